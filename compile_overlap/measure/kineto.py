"""Calls out of a trace of torch.profiler: the device's events, the host's launches of them, and who waits for whom.

The trace is the JSON that `torch.profiler.profile.export_chrome_trace` writes. What is read of it:

- `kernel`, `gpu_memcpy`: the events, with stream and correlation. The correlation is that of the host's call which
  launched it; it counts up, so it is the order of launches.
- `cuda_runtime`, `cuda_driver`: these calls; an event was launched when its call had ended.
- `user_annotation`: our ranges (`compile_overlap.ranges`); an event launched inside one is labelled with its name.
- `cuda_sync`, if the profiler was asked for them (`enable_cuda_sync_events`): a stream waits for what another stream
  had been given before an event was recorded there. With the order on each stream, these are all dependencies of a rank.
  Drivers differ in whether they say where that event was recorded; torch 2.11.0 on H200s writes -1.

A trace of several calls is cut at a marker that the timing protocol launches before each of them.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from .. import ranges
from .events import Event, kind_of, on_streams

MARKER = "spin_kernel"  # of torch.cuda._sleep
# The protocol's own work between two calls: the flush of the cache and the barrier before the next one.
_BETWEEN = re.compile(r"FillFunctor|AllReduce|^Memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Call:
    """One call's events on one rank, by their begin; `origin` is the first one's, in the profiler's microseconds.

    `dependencies`: for each event the indices of those that had to end before it; None where the trace does not say.
    """

    events: tuple[Event, ...]
    origin: float = 0.0
    dependencies: tuple[tuple[int, ...], ...] | None = None

    @property
    def span(self) -> float:
        return max(event.end for event in self.events) - self.events[0].begin


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """The trace of `run()` on this rank. Raises RuntimeError without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError("a device trace needs CUDA")
    settings = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=settings) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def calls_of(trace: Any, marker: str = MARKER) -> list[Call]:
    """The calls of a trace, in order: each begins behind a kernel whose name contains `marker`.

    Raises ValueError for what is not a trace of torch.profiler, and for one without such a call.
    """
    entries = _entries(trace)
    device = sorted(
        (each for each in entries if each["cat"] in _DEVICE), key=lambda each: (each["ts"], each["ts"] + each["dur"])
    )
    runs: list[list[dict]] = []
    for each in device:
        if marker in each["name"]:
            runs.append([])
        elif runs and not _BETWEEN.search(each["name"]):
            runs[-1].append(each)
    runs = [run for run in runs if run]
    if not runs:
        raise ValueError(
            f"trace: must hold a kernel named {marker!r} with others behind it, has {len(device)} device events"
        )
    host, syncs = _Host(entries), [each for each in entries if each["cat"] == "cuda_sync"]
    return [_call(run, host, syncs) for run in runs]


def _entries(trace: Any) -> list[dict]:
    """The complete ("X") events, checked."""
    listed = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"trace = {str(trace)[:60]}: must be a Chrome trace, an object with a list of traceEvents")
    entries = []
    for index, each in enumerate(listed):
        if not isinstance(each, dict) or not isinstance(each.get("args", {}), dict):
            raise ValueError(f"traceEvents[{index}] = {str(each)[:60]}: must be an object, with args that are one")
        if each.get("ph") != "X":
            continue
        times = each.get("ts"), each.get("dur", 0)
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in times)
        if not numbers or times[1] < 0 or not isinstance(each.get("name"), str):
            raise ValueError(
                f"traceEvents[{index}] = {str(each)[:60]}: must have a name, and finite ts and dur of at least 0"
            )
        entries.append({"cat": "", "args": {}, **each, "dur": times[1]})
    return entries


class _Host:
    """When the host had launched an event, and in which of our ranges."""

    def __init__(self, entries: list[dict]):
        self.calls = {each["args"].get("correlation"): each for each in entries if each["cat"] in _CALLS}
        self.ranges = [
            each for each in entries if each["cat"] == "user_annotation" and ranges.is_ours(each["name"])
        ]  # fmt: skip

    def place(self, event: Event, correlation: int | None, origin: float) -> Event:
        call = self.calls.get(correlation)
        if call is None:
            return event
        around = [
            each for each in self.ranges
            if each.get("tid") == call.get("tid") and each["ts"] <= call["ts"] <= each["ts"] + each["dur"]
        ]  # fmt: skip
        label = max(around, key=lambda each: each["ts"])["name"] if around else None
        return replace(event, launched=call["ts"] + call["dur"] - origin, label=label)


def _call(run: list[dict], host: _Host, syncs: list[dict]) -> Call:
    origin = run[0]["ts"]
    events, correlations = [], []
    for each in run:
        begin, stream = each["ts"] - origin, each["args"].get("stream", each.get("tid"))
        event = Event(each["name"], kind_of(each["name"]), begin, begin + each["dur"], stream)
        correlations.append(each["args"].get("correlation"))
        events.append(host.place(event, correlations[-1], origin))
    placed = on_streams(events)
    return Call(placed, origin, _dependencies(placed, correlations, syncs))


def _dependencies(events, correlations, syncs) -> tuple[tuple[int, ...], ...] | None:
    """From the order on each stream and the waits between streams; None where launches cannot be told apart.

    Kernels of one CUDA graph share its launch; without `cuda_sync` events, or with one that does not say what was
    waited for, waits between streams are unknown.
    """
    if None in correlations or len(set(correlations)) < len(correlations):
        return None
    streams = defaultdict(list)  # of each stream, (correlation, index) in the order of launches
    for index in sorted(range(len(events)), key=correlations.__getitem__):
        streams[events[index].stream].append((correlations[index], index))
    waits = [each for each in _stream_waits(syncs) if each[0] in streams]
    if len(streams) > 1 and (not syncs or any(min(each) < 0 for each in waits)):
        return None
    found: list[set[int]] = [set() for _ in events]
    for launched in streams.values():
        for (_, before), (_, after) in zip(launched, launched[1:]):
            found[after].add(before)
    for waiting, after, awaited, before in waits:
        later = bisect_left(streams[waiting], (after, -1))
        earlier = bisect_left(streams.get(awaited, ()), (before, -1))
        if earlier and later < len(streams[waiting]):
            found[streams[waiting][later][1]].add(streams[awaited][earlier - 1][1])
    return tuple(tuple(sorted(each)) for each in found)


def _stream_waits(syncs: list[dict]) -> Iterator[tuple[int, int, int, int]]:
    """(waiting stream, correlation of its wait, awaited stream, correlation of the record there), -1 for what is unknown."""
    for each in syncs:
        args = each["args"]
        keys = ("stream", "correlation", "wait_on_stream", "wait_on_cuda_event_record_corr_id")
        if args.get("cuda_sync_kind") == "Stream Wait Event":
            yield tuple(args.get(key, -1) for key in keys)
