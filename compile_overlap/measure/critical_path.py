"""The dependency critical path of a call on one rank: the chain of events that its length is made of.

From the event that ends last, each step goes to the event it waited for longest: of those that had to end before it,
the one that ended last. What lies between two events of the chain is time in which the device had nothing of the
chain to do:

    host      the later event's launch came after the earlier one's end: the device waited for the host
    latency   it had been launched: the device's own gap
    idle      the trace does not say when it was launched

The parts tile the call from its first event's begin to its last one's end.

Dependencies come from the trace (`kineto.Call.dependencies`): the order on each stream, and the waits between streams.
Where the trace has none they are inferred: an event follows the previous one of its own stream, and of each side
(computation or communication) the last to end before it began. An event can be taken for a cause then that only
happened to end in a gap, so that communication's part of the path is an upper bound.

A cause that ends after what waited for it, by the clocks of two engines, has its end cut to the other's.

Limits: the path stays on one rank. What an exchange or a barrier waited for on another one is part of its own time,
and a host that waits for another rank is `host`.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Sequence

from .events import Event

HOST, LATENCY, IDLE = "host", "latency", "idle"
_TOLERANCE_US = 0.5  # of an end that is compared with a begin: timestamps of different engines


class Part(NamedTuple):
    """A stretch of the path in microseconds: of event `index` by its kind, or of what kept it waiting."""

    index: int
    what: str
    begin: float
    end: float


def critical_path(events: Sequence[Event], dependencies: Sequence[Sequence[int]] | None = None) -> list[Part]:
    """The parts of the path in order. Raises ValueError for no events, or dependencies that are not theirs."""
    if not events:
        raise ValueError("events = (): must hold at least one event")
    if dependencies is not None and len(dependencies) != len(events):
        raise ValueError(f"dependencies of {len(dependencies)} events: must be of the {len(events)} events")
    earlier = inferred(events) if dependencies is None else dependencies
    parts: list[Part] = []
    seen: set[int] = set()  # dependencies that run in a circle end the path
    first = min(event.begin for event in events)
    index, end = max(range(len(events)), key=lambda i: events[i].end), max(event.end for event in events)
    while True:
        seen.add(index)
        cause = max((i for i in earlier[index] if i not in seen), key=lambda i: events[i].end, default=None)
        before = first if cause is None else max(first, min(end, events[cause].end))
        begin = min(end, max(events[index].begin, before))
        parts.append(Part(index, events[index].kind, begin, end))
        if before < begin:
            parts.append(Part(index, _reason(events[index], before), before, begin))
        if cause is None:
            return [part for part in reversed(parts) if part.end > part.begin]
        index, end = cause, before


def _reason(event: Event, since: float) -> str:
    if event.launched is None:
        return IDLE
    return HOST if event.launched > since else LATENCY


def inferred(events: Sequence[Event]) -> list[list[int]]:
    """For each event the previous one on its stream, and of each side the last that ended before it began."""
    found: list[list[int]] = [[] for _ in events]
    begun: list[tuple[float, int]] = []  # a heap of (end, index): what has begun and not yet ended
    ended: dict[bool, int] = {}  # of each side, the last to end
    previous: dict[tuple[int | None, bool], int] = {}  # on each stream; of each side, where streams are not known
    for index in sorted(range(len(events)), key=lambda i: (events[i].begin, events[i].end)):
        event = events[index]
        while begun and begun[0][0] <= event.begin + _TOLERANCE_US:
            end, other = heapq.heappop(begun)
            side = events[other].computes
            if side not in ended or end >= events[ended[side]].end:
                ended[side] = other
        stream = event.stream, event.computes
        found[index] = sorted({*ended.values(), previous.get(stream, index)} - {index})
        previous[stream] = index
        heapq.heappush(begun, (event.end, index))
    return found


def by_kind(parts: Sequence[Part]) -> dict[str, float]:
    """Microseconds of the path by what they were spent on, the largest first."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.what] = sums.get(part.what, 0.0) + part.end - part.begin
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
