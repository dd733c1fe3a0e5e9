"""A layer's schedule on a modelled machine: when each kernel, exchange and launch runs, what is exposed, and why.

The steps are those of `schedule.build`, the value that the passes follow. They run on four lanes, each in its order:

    host       issues kernels and collectives; nothing runs before it was issued
    compute    packs, GEMMs, gated norms, the block around the layer
    local      exchanges between the GPUs of a host: NVLink, or what there is
    network    exchanges between hosts, over their cards

Collectives: one communicator runs its exchanges in order, each on both lanes. While NCCL's kernels run, a GEMM has
fewer SMs; without reserved SMs a combine that is ready when the next GEMM begins starts behind it, and other
exchanges are slower beside computation. Through the peers' memory: dispatches are stores and copies without a pack, the
first one in two parts if the plan says so (`Plan.head`); a combine travels while the second GEMM computes; between hosts
both are collectives.

Everything here is simulated. A duration follows from the case alone, not from what happens to run at a time, so a
faster link, GPU or host never makes the total longer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Iterable, NamedTuple

from .layout import Layout
from .machines import Machine
from .schedule import BACKWARD, FORWARD, FREE, GEMM, START, WAIT, Plan, Schedule, Step, Work, build

HOST, COMPUTE, LOCAL, NETWORK = LANES = ("host", "compute", "local", "network")
LAUNCH, BLOCK, PACK, NORM, EXCHANGE, COPY = "launch", "block", "pack", "norm", "exchange", "copy"
HOST_LEAD_S = 2e-4  # the benchmark's timer keeps the GPU busy for about this time before a call


@dataclass(frozen=True)
class Case:
    """What is simulated. `plan` None is the sequential reference `none`; `training` adds the backward.

    `comm_scale` pads what exchanges send; without `exchanged` they cost nothing (comp-only). `by_rows`: what if the
    plan's chunks were parts of the P*B rows, with all L tokens each? Weights are then read once for each chunk, and
    their gradients added up.
    """

    machine: Machine
    layout: Layout
    plan: Plan | None = None
    training: bool = False
    itemsize: int = 2
    comm_scale: int = 1
    exchanged: bool = True
    by_rows: bool = False


class Interval(NamedTuple):
    """Something that ran on a lane, in seconds. `cause`: index of the interval that it had to wait for; -1 for none."""

    lane: str
    kind: str
    label: str
    begin: float
    end: float
    reason: str = ""
    cause: int = -1


@dataclass(frozen=True)
class Timeline:
    """What ran when; the time begins with the call's first kernel, the host `HOST_LEAD_S` earlier."""

    intervals: tuple[Interval, ...]

    @property
    def total(self) -> float:
        return max(interval.end for interval in self.intervals)

    @property
    def communication(self) -> float:
        """Time in which an exchange runs."""
        return _length(_union(self.intervals, (LOCAL, NETWORK)))

    @property
    def exposed(self) -> float:
        """Time in which an exchange runs and nothing is computed."""
        busy = _length(_union(self.intervals, (COMPUTE,)))
        return max(0.0, _length(_union(self.intervals, (COMPUTE, LOCAL, NETWORK))) - busy)

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication beside computation, 0 to 1; 0 where there is none."""
        return 1 - min(1.0, self.exposed / self.communication) if self.communication else 0.0

    @property
    def layer(self) -> float:
        """Computation of the layer itself: GEMMs and norms."""
        return sum(i.end - i.begin for i in self.intervals if i.lane == COMPUTE and i.kind in (GEMM, FREE, NORM))

    def busy(self, lane: str) -> float:
        return sum(i.end - i.begin for i in self.intervals if i.lane == lane)

    def critical_path(self) -> tuple[Interval, ...]:
        """The chain of intervals, each waiting for the one before, that ends last."""
        path = [max(self.intervals, key=lambda interval: interval.end)]
        while path[-1].cause >= 0:
            path.append(self.intervals[path[-1].cause])
        return tuple(reversed(path))


def _union(intervals: tuple[Interval, ...], lanes: tuple[str, ...]) -> list[list[float]]:
    merged: list[list[float]] = []
    for begin, end in sorted((i.begin, i.end) for i in intervals if i.lane in lanes):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def _length(spans: list[list[float]]) -> float:
    return sum(end - begin for begin, end in spans)


@functools.lru_cache(maxsize=256)
def simulate(case: Case) -> Timeline:
    """The timeline of one call on one rank. Raises ValueError where P does not fit the machine's hosts."""
    run = _Run(case)
    for direction in (FORWARD, BACKWARD) if case.training else (FORWARD,):
        run.direction(direction)
    return Timeline(tuple(run.intervals))


def gemm_shapes(layout: Layout, direction: str) -> dict[tuple[str, int], tuple[int, int, int]]:
    """(rows, K, columns) of each token's GEMMs, by the step that runs them."""
    rows, D, H = layout.rows, layout.D, layout.H
    if direction == FORWARD:
        return {(GEMM, 0): (rows, D, 2 * H), (GEMM, 1): (rows, H, D)}
    return {(GEMM, 0): (rows, D, H), (GEMM, 1): (rows, 2 * H, D), (FREE, 0): (H, rows, D), (FREE, 1): (D, rows, 2 * H)}


def sequential_steps(schedule: Schedule) -> tuple[Step, ...]:
    """The steps of a sequential layer: its second exchange starts when all is computed, weight gradients too."""
    return tuple(sorted(schedule.steps, key=lambda step: step.exchange == 2))


class _Run:
    """The lanes' clocks and what has run on them."""

    def __init__(self, case: Case):
        self.case, self.machine, self.layout = case, case.machine, case.layout
        self.sequential = case.plan is None
        self.plan = Plan((case.layout.L,)) if self.sequential else case.plan
        self.software = self.machine.stack.reference if self.sequential else self.machine.stack.own
        local = self.machine.local_ranks(case.layout.P)
        self.local_share, self.remote_share = (local - 1) / case.layout.P, 1 - local / case.layout.P
        self.intervals: list[Interval] = []
        self.clock = {HOST: -HOST_LEAD_S, COMPUTE: 0.0, LOCAL: 0.0, NETWORK: 0.0}
        self.last = dict.fromkeys(LANES, -1)
        self.issue("call", self.software.call_s)

    def add(self, lane: str, kind: str, label: str, seconds: float, reason: str, after: Iterable[int] = ()) -> int:
        """Run something as soon as its lane is free and all of `after` has ended; returns its index."""
        waits = [(self.clock[lane], self.last[lane]), *((self.intervals[index].end, index) for index in after)]
        begin, cause = max(waits, key=lambda wait: wait[0])
        self.intervals.append(Interval(lane, kind, label, begin, begin + seconds, reason, cause))
        self.clock[lane], self.last[lane] = begin + seconds, len(self.intervals) - 1
        return self.last[lane]

    def issue(self, label: str, seconds: float) -> int:
        return self.add(HOST, LAUNCH, label, seconds, "issued in the host's order")

    def compute(self, kind: str, label: str, seconds: float, reason: str, kernels: int = 1) -> int:
        """Kernels on the compute lane, behind their launch and the exchanges that have been waited for."""
        issued = self.issue(label, kernels * self.software.launch_s)
        after, self.arrived = (issued, *self.arrived), ()
        return self.add(COMPUTE, kind, label, seconds, reason, after)

    def direction(self, direction: str) -> None:
        """All steps of one direction, between the parts of the block around the layer."""
        schedule = build(direction, self.plan, (Work(2, 2 if direction == BACKWARD else 0),) * len(self.plan.sizes))
        steps = sequential_steps(schedule) if self.sequential else schedule.steps
        self.name, self.shapes = direction, gemm_shapes(self.layout, direction)
        self.arrived: tuple[int, ...] = ()
        self.ends: dict[tuple[int, int], tuple[int, ...]] = {}
        self.held: _Exchange | None = None
        self.stolen = 0.0
        block = self.software.passes.of(direction)[1] / 2 * self.streamed(self.layout.B * self.layout.T * self.layout.D)
        kernels = self.software.block_kernels
        self.compute(BLOCK, "block", block, "the layer reads what it computes", kernels)
        for position, step in enumerate(steps):
            label = schedule.label(step)
            if step.kind == START:
                first = step.exchange == 1 and step.chunk == 0
                followed = any(later.kind in (GEMM, FREE) for later in steps[position:])
                self.start(step, label, beside=followed and not first and len(self.plan.sizes) > 1)
            elif step.kind == WAIT:
                self.wait(step, label)
            else:
                self.gemm(step, label)
        self.compute(BLOCK, "block", block, "reads the layer's output", kernels)

    def streamed(self, elements: float) -> float:
        """Seconds of one traversal."""
        return elements * self.case.itemsize / self.machine.gpu.bytes_per_s

    def payload(self, chunk: int) -> float:
        """Elements of one exchange of a chunk, those that stay included."""
        return self.part(chunk) * self.layout.B * self.layout.T * self.layout.D * self.case.comm_scale

    def part(self, chunk: int) -> float:
        """A chunk's share of the layer."""
        return self.plan.sizes[chunk] / sum(self.plan.sizes)

    def start(self, step: Step, label: str, beside: bool) -> None:
        self.release()
        key, elements, peers = (step.chunk, step.exchange), self.payload(step.chunk), self.plan.peers
        packed = elements * (self.remote_share if peers else 1.0)
        after = (self.last[COMPUTE],)
        if packed:
            after = (self.compute(PACK, f"pack {label}", 2 * self.streamed(packed), step.reason),)
        if not self.case.exchanged or self.layout.P == 1:
            self.ends[key] = after
            return
        ends = ()
        if peers and self.local_share:
            stored = self.head_of(step.chunk) if step.exchange == 1 else self.plan.sizes[step.chunk]
            ends = (self.by_memory(step, label, after, stored),)
        if not peers or self.remote_share:
            issued = self.issue(label, self.software.collective_s)
            self.held = _Exchange(step, label, (*after, issued), beside, ends)
            if not (step.exchange == 2 and beside and self.takes_sms()):
                self.release()
        else:
            self.ends[key] = ends

    def takes_sms(self) -> bool:
        """Whether NCCL's kernels and GEMMs compete for SMs."""
        return self.machine.local.sm_share > 0 and not self.plan.reserved_sms

    def release(self, *after: int) -> None:
        """Start the collective that is held back, if there is one, behind `after`."""
        if self.held is None:
            return
        held, self.held = self.held, None
        elements, after = self.payload(held.step.chunk), (*held.after, *after)
        parts = [(NETWORK, self.machine.network(self.layout.P), self.remote_share)]
        parts += [] if self.plan.peers else [(LOCAL, self.machine.local, self.local_share)]
        parts = [part for part in parts if part[2]]
        after += tuple(self.last[lane] for lane, _, _ in parts if self.last[lane] >= 0)  # one communicator
        ends = held.ends
        for lane, link, share in parts:
            seconds = elements * share * self.case.itemsize / link.bytes_per_s * (link.beside if held.beside else 1.0)
            ends += (self.add(lane, EXCHANGE, held.label, link.latency_s + seconds, held.step.reason, after),)
            if held.beside and self.takes_sms():
                self.stolen += link.sm_share * seconds
        self.ends[held.step.chunk, held.step.exchange] = ends

    def head_of(self, chunk: int) -> int:
        """Tokens of a chunk that must have arrived before its first GEMM can begin."""
        size = self.plan.sizes[chunk]
        in_parts = self.plan.peers and not chunk and self.case.exchanged and self.local_share and not self.remote_share
        return self.plan.stored(size) if in_parts else size

    def by_memory(self, step: Step, label: str, after: tuple[int, ...], tokens: int) -> int:
        """Stores or copies into the memory of the host's peers; a combine's are those of the GEMM before it."""
        rate = self.machine.memory_bytes_per_s
        if rate is None:
            raise ValueError(f"plan = {self.plan}: GPUs of {self.machine.local.name} cannot address each other")
        share = tokens / self.plan.sizes[step.chunk] * self.local_share
        seconds = share * self.payload(step.chunk) * self.case.itemsize / rate
        if step.kind == GEMM:
            after = (*after, self.issue(label, 3 * self.layout.P * self.software.launch_s))  # copies, signals, waits
        elif step.exchange == 2:
            before = self.intervals[self.second_gemm].cause
            after = (before,) if before >= 0 else ()
        else:
            after = (*after, self.issue(label, self.machine.stack.peer_s / 2))
        return self.add(LOCAL, EXCHANGE, label, self.machine.local.latency_s / 4 + seconds, step.reason, after)

    def wait(self, step: Step, label: str) -> None:
        key = (step.chunk, step.exchange)
        if key not in self.ends:
            self.release()
        if self.plan.peers and self.case.exchanged:
            self.issue(label, self.machine.stack.peer_s / 2)
        self.arrived += self.ends[key]
        if self.plan.peers and step.exchange == 2:
            self.compute(COPY, label, 2 * self.streamed(self.payload(step.chunk)), "a private copy of the results")

    def gemm(self, step: Step, label: str) -> None:
        stack, second = self.machine.stack, step.kind == GEMM and step.index == 1
        seconds = self.gemm_seconds(step) / self.software.gemms + self.stolen
        self.stolen = 0.0
        if second and self.plan.peers:
            seconds /= stack.peer_gemms
            self.issue(label, stack.peer_s / 2)
        size, head = self.plan.sizes[step.chunk], self.head_of(step.chunk)
        if head < size and (step.kind, step.index) == (GEMM, 0):
            seconds = self.gemm_seconds(step, size - head) / self.software.gemms
            first = self.gemm_seconds(step, head) / self.software.gemms
            self.compute(step.kind, f"{label} (head)", first, step.reason)
            self.arrived = (self.by_memory(step, "the other tokens", self.ends[step.chunk, 1], size - head),)
        done = self.compute(step.kind, label, seconds, step.reason)
        if second:
            self.second_gemm = done
        self.release(done)
        if step.kind == GEMM and step.index == 0:
            passes = self.software.passes.of(self.name)[0]
            norm = passes * self.streamed(self.part(step.chunk) * self.layout.L * self.layout.rows * self.layout.H)
            norm += stack.chunk_seconds(self.name) * (step.chunk > 0)
            self.compute(NORM, f"norm {step.chunk}", norm, "between the GEMMs", self.software.epilogue_kernels)

    def gemm_seconds(self, step: Step, tokens: int | None = None) -> float:
        """A chunk's GEMM, or that of some of its tokens, by the GPU's best kernel."""
        batch, (rows, inner, columns) = tokens or self.plan.sizes[step.chunk], self.shapes[step.kind, step.index]
        gpu, reserved, itemsize = self.machine.gpu, self.plan.reserved_sms, self.case.itemsize
        if not self.case.by_rows:
            return gpu.gemm_seconds(batch, rows, inner, columns, itemsize, reserved)
        own = math.ceil(self.part(step.chunk) * self.layout.rows)
        if step.kind == GEMM:
            return gpu.gemm_seconds(self.layout.L, own, inner, columns, itemsize, reserved)
        added = 2 * self.streamed(self.layout.L * rows * columns) * (step.chunk > 0)
        return gpu.gemm_seconds(self.layout.L, rows, own, columns, itemsize, reserved) + added


class _Exchange(NamedTuple):
    """A collective that has been issued: behind what it runs, whether beside computation, parts that have begun."""

    step: Step
    label: str
    after: tuple[int, ...]
    beside: bool
    ends: tuple[int, ...]
