"""The dependency critical path of a call on one rank: the chain of events that its length is made of.

From the event that ends last, each step goes to the event it waited for longest: of those that had to end before it,
the one that ended last. What lies between two events of the chain is time in which the device had nothing of the
chain to do:

    host      the later event's launch came after the earlier one's end: the device waited for the host
    latency   it had been launched: the device's own gap
    idle      the trace does not say when it was launched

The parts tile the call from its first event's begin to its last one's end.

Dependencies come from the trace (`kineto.Call.dependencies`): the order on each stream, and the waits between streams.
Where the trace has none they are inferred: an event follows the previous one of its own side (computation or
communication), and the last of the other side to end before it began. An event can be taken for a cause then that only
happened to end in a gap, so that communication's part of the path is an upper bound.

Limits: the path stays on one rank. What an exchange or a barrier waited for on another one is part of its own time,
and a host that waits for another rank is `host`.
"""

from __future__ import annotations

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
    first = min(event.begin for event in events)
    index, end = max(range(len(events)), key=lambda i: events[i].end), max(event.end for event in events)
    while True:
        causes = [i for i in earlier[index] if events[i].end < end]
        cause = max(causes, key=lambda i: events[i].end, default=None)
        before = first if cause is None else max(first, events[cause].end)
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
    """For each event its previous one on the same side, and the last of the other side that ended before it began."""
    order = sorted(range(len(events)), key=lambda i: (events[i].begin, events[i].end))
    found: list[list[int]] = [[] for _ in events]
    for place, index in enumerate(order):
        event, before = events[index], order[:place]
        same = [i for i in before if events[i].computes == event.computes]
        other = [
            i for i in before
            if events[i].computes != event.computes and events[i].end <= event.begin + _TOLERANCE_US
        ]  # fmt: skip
        found[index] = same[-1:] + sorted(other, key=lambda i: events[i].end)[-1:]
    return found


def by_kind(parts: Sequence[Part]) -> dict[str, float]:
    """Microseconds of the path by what they were spent on, the largest first."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.what] = sums.get(part.what, 0.0) + part.end - part.begin
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
