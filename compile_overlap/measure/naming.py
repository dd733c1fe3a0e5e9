"""Names for a call's exchanges and GEMMs: matched one by one with the steps of its schedule, which fixes their order.

One communicator runs its exchanges in the order of their starts, and a stream its GEMMs, so the n-th event is the
n-th step. Where the counts differ (another layer beside this one, a GEMM that runs as several kernels) nothing of
that kind is named. Events that a profiler range has named keep that name.

Limit: the schedule is built from the plan. Where a backward runs the chunks in reverse and their sizes, set by hand,
are no palindrome, its starts can have another order than the one that is assumed here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable

from ..ranges import exchange
from ..schedule import BACKWARD, FORWARD, FREE, GEMM, START, Plan, Schedule, Work, build
from . import events as kinds
from .events import Event


def schedules_of(plan: Plan, backward: bool) -> tuple[Schedule, ...]:
    """What a call of the layer follows: its forward's schedule, and its backward's where that runs too."""
    chunks = len(plan.sizes)
    forward = build(FORWARD, plan, (Work(2),) * chunks)
    return (forward, build(BACKWARD, plan, (Work(2, 2),) * chunks)) if backward else (forward,)


def named(events: Iterable[Event], schedules: Iterable[Schedule]) -> tuple[Event, ...]:
    """The events with the labels of their steps, such as `dispatch 0`, `combine' 2`, `gemm1 3` and `free0 1`."""
    events = list(events)
    starts, products = [], []
    for schedule in schedules:
        backward = schedule.direction == BACKWARD
        mark = "'" * backward
        for step in schedule.steps:
            if step.kind == START:
                starts.append(exchange(step.exchange, step.chunk, backward))
            elif step.kind in (GEMM, FREE):
                products.append(schedule.label(step).replace(" ", f"{mark} "))
    _label(events, starts, (kinds.NCCL,))
    _label(events, products, (kinds.GEMM, kinds.COMBINE))
    return tuple(events)


def _label(events: list[Event], labels: list[str], of: tuple[str, ...]) -> None:
    matched = [index for index, event in enumerate(events) if event.kind in of]
    if len(matched) == len(labels):
        for index, label in zip(matched, labels):
            events[index] = replace(events[index], label=events[index].label or label)
