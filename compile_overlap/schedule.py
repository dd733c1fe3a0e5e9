"""The order in which a layer's exchanges, waits and GEMMs run: a value that can be printed, tested and simulated.

A chunk's work is the same in both directions: its first exchange brings rows in, GEMMs and an epilogue turn them into
rows that its second exchange takes away. Forward these are dispatch and combine; backward the gradient of combine and
the gradient of dispatch. Backward also has free work: the weight gradients, which no exchange waits for.

    forward    D0 D1 | w0 GEMM D2 GEMM C0 | w1 GEMM D3 GEMM C1 | ...
    backward   C0' C1' | w0 dH C2' dX D0' | w1 dH dX D1' | dWout0 dW0 ...      (peers: C0' | w0 dH dWout0 dX D0' | dW0)

`build` follows a simulation on two lanes, compute and exchange (one communicator runs its exchanges in order):

- the next chunk's first exchange starts before this chunk's wait; a later one, which would only queue behind it, when
  the host has issued this chunk's first GEMM: a start costs the host 0.1 ms and more, in which the device would idle;
- `ahead`, the in-flight budget, bounds the chunks that have started beyond the one that is computed;
- a wait stands just before the first GEMM that reads what it waits for;
- a second exchange starts as soon as its chunk is done, before the next first exchange;
- free work runs where the next chunk has not arrived, when more than `backlog` chunks of it are owed (they hold the
  operands in memory), and after the last second exchange, which has nothing else to hide under;
- through the peers' memory a chunk's first free GEMM, which reads the rows that its first exchange brought, runs before
  its last GEMM on the way, after which the peers may write over them: otherwise it would need a copy.

Times are relative: one token's forward computation takes 1, its exchange `ratio_16ths / 16`. Every rank builds the same
schedule, since the plan is part of the graph (in the group's alias, see `passes.graphs`).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
START, WAIT, GEMM, FREE = "start", "wait", "gemm", "free"

MIN_TOKENS = 2  # of a batched GEMM: one of a single matrix takes another cuBLAS path and rounds differently

# Shares of a token's forward computation at the default workload on an H200: GEMMs 2.7 ms of 4.1, epilogue the rest.
_GEMM, _EPILOGUE = 0.35, 0.3


@dataclass(frozen=True)
class Plan:
    """What all ranks agreed on for one layer.

    `sizes`: tokens of each chunk along L. `ratio_16ths`: a chunk's exchange time over its forward compute time, in 16ths.
    `ahead`: chunks whose first exchange may be in flight or unread beyond the one that is computed: the in-flight
    budget. `backlog`: chunks whose weight gradients may be owed. `reserved_sms`: SMs that GEMMs leave to the exchanges.
    `peers`: exchanges go through the peers' memory instead of collectives. `own_first`: there, the first chunk's first
    GEMM begins with the rank's own rows, or its host's if there are several. `head`: there, it begins with so many tokens,
    which are stored at once; 0 for all. `triton`: what runs by our kernels instead of
    the compiler's choice: `forward`, `backward`, each chunk's first GEMM there; `norm1024x8`, the gated norm, summed in
    that order. `disabled`: passes that are switched off.
    """

    sizes: tuple[int, ...]
    ratio_16ths: int = 4
    ahead: int = 2
    backlog: int = 1
    reserved_sms: int = 0
    peers: bool = False
    own_first: bool = False
    head: int = 0
    triton: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()

    def stored(self, size: int) -> int:
        """Tokens of a first chunk of `size` that are stored at once: all where `head` does not leave enough for a GEMM."""
        return self.head if MIN_TOKENS <= self.head <= size - MIN_TOKENS else size

    def __str__(self) -> str:
        triton = f" triton={','.join(self.triton)}" if self.triton else ""
        off = f" off={','.join(self.disabled)}" if self.disabled else ""
        numbers = f"r{self.ratio_16ths} a{self.ahead} b{self.backlog} s{self.reserved_sms}"
        transport = f"{' peers' if self.peers else ''}{' own-first' if self.own_first else ''}"
        transport += f" head={self.head}" if self.head else ""
        return f"{','.join(map(str, self.sizes))} {numbers}{transport}{triton}{off}"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that `str` wrote. Raises ValueError for any other text."""
        size, count, name = "[1-9][0-9]{0,8}", "([0-9]{1,9})", "[a-z][a-z0-9-]*"
        numbers = f"({size}(?:,{size})*) r{count} a{count} b{count} s{count}"
        names = f"({name}(?:,{name})*)"
        found = re.fullmatch(f"{numbers}( peers)?( own-first)?(?: head=({size}))?(?: triton={names})?(?: off={names})?", text)
        if found is None:
            raise ValueError(f"plan = {text!r}: must be sizes, ratio, ahead and backlog, such as '8,8 r4 a2 b1 s0'")
        sizes, *numbers, peers, own_first, head, triton, disabled = found.groups()
        names = (tuple(text.split(",")) if text else () for text in (triton, disabled))
        return cls(tuple(map(int, sizes.split(","))), *map(int, numbers), bool(peers), bool(own_first), int(head or 0), *names)


class Work(NamedTuple):
    """What one chunk does in one direction: GEMMs on the way to its second exchange, free GEMMs, and whether it has one."""

    gemms: int
    free: int = 0
    second: bool = True


class Step(NamedTuple):
    """One anchor of the order. `exchange` is 1 or 2 for starts and waits; `index` counts a chunk's GEMMs of its kind."""

    kind: str
    chunk: int
    exchange: int = 0
    index: int = 0
    reason: str = ""

    @property
    def lane(self) -> str:
        return "exchange" if self.kind == START else "compute"


class Interval(NamedTuple):
    """A step's simulated time, in units of one token's forward computation."""

    step: Step
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Steps of one layer in one direction, in the order in which the host issues them."""

    direction: str
    plan: Plan
    steps: tuple[Step, ...]

    def label(self, step: Step) -> str:
        """Short name of a step: D0 starts chunk 0's dispatch, C1' the gradient of chunk 1's combine."""
        letter = "DC"[step.exchange - 1] if self.direction == FORWARD else "CD"[step.exchange - 1] + "'"
        if step.kind in (START, WAIT):
            name = f"{letter[0]}{step.chunk}{letter[1:]}"
            return name if step.kind == START else f"wait {name}"
        return f"{'gemm' if step.kind == GEMM else 'free'}{step.index} {step.chunk}"

    def __str__(self) -> str:
        rows = [f"{self.label(step):<10} {step.reason}" for step in self.steps]
        return "\n".join([f"{self.direction}, plan {self.plan}", *rows])

    def in_flight(self) -> int:
        """Largest number of tokens whose first exchange has started and whose first GEMM has not begun."""
        tokens = most = 0
        for step in self.steps:
            if step.exchange == 1:
                tokens += self.plan.sizes[step.chunk] * (1 if step.kind == START else -1)
                most = max(most, tokens)
        return most

    def simulate(self) -> tuple[Interval, ...]:
        """When each step runs, on the two lanes."""
        lanes = _Lanes(self.plan)
        return tuple(lanes.run(step) for step in self.steps)

    def exposed(self) -> float:
        """Simulated time in which computation waits for exchanges."""
        return sum(i.end - i.begin for i in self.simulate() if i.step.kind == WAIT)

    def length(self) -> float:
        """Simulated time from the first step to the last."""
        return max(interval.end for interval in self.simulate())


class _Lanes:
    """The two lanes' clocks: exchanges run one after the other, and not before what the host issued ahead of them."""

    def __init__(self, plan: Plan):
        self.plan, self.ratio = plan, plan.ratio_16ths / 16
        self.compute = self.exchange = 0.0
        self.arrival: dict[tuple[int, int], float] = {}

    def run(self, step: Step) -> Interval:
        size = self.plan.sizes[step.chunk]
        if step.kind == START:
            begin = max(self.exchange, self.compute)
            self.exchange = end = begin + size * self.ratio
            self.arrival[step.chunk, step.exchange] = end
            return Interval(step, begin, end)
        begin = self.compute
        if step.kind == WAIT:
            self.compute = max(begin, self.arrival[step.chunk, step.exchange])
        else:
            epilogue = _EPILOGUE if step.kind == GEMM and step.index else 0.0
            self.compute = begin + size * (_GEMM + epilogue)
        return Interval(step, begin, self.compute)


def build(direction: str, plan: Plan, works: tuple[Work, ...]) -> Schedule:
    """The schedule of a layer whose chunk c does `works[c]`. Raises ValueError unless there is one for each size."""
    if len(works) != len(plan.sizes):
        raise ValueError(f"works = {works}: must be one for each of the {len(plan.sizes)} chunks")
    lanes = _Lanes(plan)
    steps: list[Step] = []

    def add(*step) -> None:
        steps.append(Step(*step))
        lanes.run(steps[-1])

    owed: deque[list[Step]] = deque()

    def pay(reason: str) -> None:
        free = owed[0].pop(0)
        add(*free[:4], reason)
        if not owed[0]:
            owed.popleft()

    started = 0
    for chunk, work in enumerate(works):
        while started < min(len(works), chunk + 2, chunk + 1 + plan.ahead):
            add(START, started, 1, 0, "the next to be read")
            started += 1
        while owed and lanes.arrival[chunk, 1] > lanes.compute:
            pay("fills the time until the next chunk arrives")
        add(WAIT, chunk, 1, 0, "its rows are read next")
        in_place = plan.peers and work.gemms > 1 and work.free > 0
        for index in range(work.gemms):
            if in_place and index == work.gemms - 1:
                add(FREE, chunk, 0, 0, "reads rows that the last GEMM gives back to the peers")
            add(GEMM, chunk, 0, index, "on the way to the second exchange")
            while index == 0 and started < min(len(works), chunk + 1 + plan.ahead):
                add(START, started, 1, 0, "as far as the in-flight budget allows")
                started += 1
        if work.second:
            add(START, chunk, 2, 0, "its rows are done")
        if work.free > in_place:
            owed.append([Step(FREE, chunk, 0, index) for index in range(in_place, work.free)])
        while len(owed) > plan.backlog and chunk + 1 < len(works):
            pay("more chunks' operands are held than the backlog allows")
    while owed:
        pay("hides the last exchange")
    for chunk, work in enumerate(works):
        if work.second:
            add(WAIT, chunk, 2, 0, "its rows are read next")
    return Schedule(direction, plan, tuple(steps))
