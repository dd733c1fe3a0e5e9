"""A call as a Chrome trace: one process a rank, one track a lane, what is exposed and the critical path below them.

The file opens in ui.perfetto.dev and chrome://tracing. Times are microseconds from the first rank's first event;
ranks of one host share a clock, those of several hosts do not.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from .critical_path import critical_path
from .events import LANES, communication, computation
from .intervals import without
from .kineto import Call

_TRACKS = 100  # most of one lane: events of a lane that overlap stand in tracks of their own


def chrome_trace(ranks: Sequence[Call], facts: dict[str, Any]) -> dict[str, Any]:
    """The calls of ranks 0, 1, ... as one trace; `facts` are kept beside it."""
    start = min(call.origin for call in ranks)
    entries = [entry for rank, call in enumerate(ranks) for entry in _process(rank, call, call.origin - start)]
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": facts}


def _process(rank: int, call: Call, shift: float) -> Iterable[dict[str, Any]]:
    yield _name("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _name("process_sort_index", rank, 0, {"sort_index": rank})
    for lane_index, lane in enumerate(LANES):
        slices = [
            (
                event.begin,
                event.end,
                event.label or event.name,
                event.kind,
                {"kernel": event.name, "stream": event.stream},
            )
            for event in call.events
            if event.lane == lane
        ]
        yield from _lane(rank, lane_index, lane, slices, shift)
    exposed = without(communication(call.events), computation(call.events))
    rows = [(begin, end, "exposed", "exposed", {}) for begin, end in exposed]
    yield from _lane(rank, len(LANES), "exposed communication", rows, shift)
    path = []
    for part in critical_path(call.events, call.dependencies):
        event = call.events[part.index]
        label = (event.label or event.name) if part.what == event.kind else part.what
        path.append((part.begin, part.end, label, part.what, {"of": event.name}))
    yield from _lane(rank, len(LANES) + 1, "critical path", path, shift)


def _lane(rank: int, index: int, name: str, slices: list[tuple], shift: float) -> Iterable[dict[str, Any]]:
    free: list[float] = []
    for begin, end, label, category, args in slices:
        track = next((i for i, until in enumerate(free) if until <= begin), len(free))
        free[track : track + 1] = [end]
        first, last = round(begin + shift, 3), round(end + shift, 3)
        place = {"pid": rank, "tid": _tid(index, track), "ts": first, "dur": round(last - first, 3)}
        yield {"ph": "X", "name": label, "cat": category, **place, "args": args}
    for track in range(len(free)):
        tid = _tid(index, track)
        yield _name("thread_name", rank, tid, {"name": name if not track else f"{name} ({track + 1})"})
        yield _name("thread_sort_index", rank, tid, {"sort_index": tid})


def _tid(lane: int, track: int) -> int:
    return 1 + lane * _TRACKS + track


def _name(what: str, rank: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}
