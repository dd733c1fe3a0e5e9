"""A call's events as they stand in a `trace` record, and back."""

from __future__ import annotations

import math
from typing import Any

from .events import KINDS, Event, kind_of
from .kineto import Call

LONGEST_US = 1e9  # no call takes as long as a quarter of an hour


def call_to_record(call: Call) -> dict[str, Any]:
    """{"kernels": the events in order, "dependencies": see `Call`}."""
    return {"kernels": [_to_json(event) for event in call.events], "dependencies": call.dependencies}


def call_from_record(record: dict[str, Any]) -> Call:
    """The call of a `trace` record. Records from before lanes had kinds are classified by their kernels' names.

    Raises ValueError for what is not such a record.
    """
    kernels = record.get("kernels") if isinstance(record, dict) else None
    if not isinstance(kernels, list) or not kernels:
        raise ValueError(f"kernels = {str(kernels)[:80]}: must be a list of events that is not empty")
    events = tuple(_from_json(index, kernel) for index, kernel in enumerate(kernels))
    if any(later.begin < earlier.begin for earlier, later in zip(events, events[1:])):
        raise ValueError("kernels: must be in the order of their begin")
    end = max(event.end for event in events)
    if not 0 < end <= LONGEST_US:
        raise ValueError(f"kernels: end after {end:g} us; must end after 0 and within {LONGEST_US:g}")
    return Call(events, 0.0, _dependencies(record.get("dependencies"), len(events)))


def _dependencies(listed: Any, count: int) -> tuple[tuple[int, ...], ...] | None:
    if listed is None:
        return None
    lists = isinstance(listed, list) and len(listed) == count and all(isinstance(each, list) for each in listed)
    if not lists or not all(type(index) is int and 0 <= index < count for each in listed for index in each):
        raise ValueError(f"dependencies = {str(listed)[:80]}: must be indices of events, for each of {count}")
    return tuple(map(tuple, listed))


def _to_json(event: Event) -> dict[str, Any]:
    optional = {"stream": event.stream, "launched_us": event.launched, "label": event.label}
    return {
        "name": event.name[:160],
        "lane": event.lane,
        "kind": event.kind,
        "begin_us": event.begin,
        "duration_us": event.duration,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _from_json(index: int, kernel: Any) -> Event:
    problem = f"kernels[{index}] = {str(kernel)[:80]}"
    try:
        begin, duration = float(kernel["begin_us"]), float(kernel["duration_us"])
        kind = kernel.get("kind") or kind_of(kernel["name"])
        stream, launched, label = (kernel.get(key) for key in ("stream", "launched_us", "label"))
        event = Event(str(kernel["name"]), kind, begin, begin + duration, stream, launched, label)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{problem}: must have name, begin_us and duration_us") from error
    if event.kind not in KINDS or not (begin >= 0 and duration >= 0) or not math.isfinite(begin + duration):
        raise ValueError(f"{problem}: must be of a known kind, with finite times of at least 0")
    optional = ("stream", stream, int), ("launched_us", launched, (int, float)), ("label", label, str)
    for key, value, expected in optional:
        if value is not None and (isinstance(value, bool) or not isinstance(value, expected)):
            raise ValueError(f"{problem}: {key} must be {expected}, or absent")
    if launched is not None and not math.isfinite(launched):
        raise ValueError(f"{problem}: launched_us must be finite")
    return event
