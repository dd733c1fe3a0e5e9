"""What one configuration does: its chunks and in-flight budget. A pure function of values that all ranks share."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Iterator

import torch

from .config import Settings
from .layout import Layout, is_altered, require
from .costs import Costs
from .machines import Gpu, Machine, machine as machine_of
from .schedule import MIN_TOKENS, Plan
from .simulate import Case, simulate

DEFAULT_CHUNKS = 4
CANDIDATE_CHUNKS = (1, 2, 4, 8)
SMALLEST_END = 4096  # rows of all tokens of a chunk, below which its GEMMs fill an H200 badly
# From this ratio of an exchange to its chunk's computation on, GEMMs leave SMs to NCCL's kernels (1.38x -> 1.52x over
# host shared memory); over NVLink (1/16) the exchanges are short and the SMs worth more.
RESERVING_RATIO_16THS = 4
RESERVED_SMS = 16
MAX_RATIO_16THS = 1024
CPU_PER_GEMM = 1.2  # a CPU's forward computation over its GEMMs
HEADS = (2, 3, 4, 6, 8)  # tokens of a first chunk that may be dispatched before the others
# What that must save by prediction for each copy, signal and wait, of which there are three a rank: as much as they cost
# the host, which bounds the calls of small layers.
HEAD_LAUNCH_S = 5e-6
AS_FAST = 0.01  # predictions that lie so close are not told apart (the model's error is larger): fewer chunks win


def border_quantum(device: str, rows: int, H: int) -> int:
    """Tokens of which a chunk's border must be a multiple, for [L,rows,H] intermediates; 1 on CUDA.

    ATen's CPU kernels compute the elements left over from whole vector steps (64 in bf16 with AVX-512, fewer otherwise)
    with scalar functions, whose exp rounds differently: a border inside a step would make such elements of others.
    """
    return 1 if device != "cpu" else 64 // math.gcd(64, rows * H)


def chunk_sizes(L: int, P: int, settings: Settings, quantum: int = 1) -> tuple[int, ...]:
    """Token counts of the chunks, L in all; one chunk unless asked otherwise at P = 1, where no exchange hides.

    Near-equal, the smaller ones first, since nothing hides the first chunk's dispatch; borders at multiples of
    `quantum`. A chunk has at least two tokens (or all of L): a batched GEMM of one matrix takes another cuBLAS path
    than the full batch and rounds differently. Raises ValueError where `A2A_FFN_CHUNKS` does not fit L.
    """
    if settings.sizes:
        total = sum(settings.sizes)
        fits = total == L and min(settings.sizes) >= min(MIN_TOKENS, L)
        require(fits, "A2A_FFN_CHUNKS", settings.sizes, f"sizes of at least {MIN_TOKENS} tokens whose sum is L = {L}")
        return settings.sizes
    wanted = settings.chunks or (DEFAULT_CHUNKS if P > 1 else 1)
    units, rest = divmod(L, quantum)
    count = max(1, min(wanted, L // MIN_TOKENS, units))
    small, larger = divmod(units, count)
    sizes = [quantum * small] * (count - larger) + [quantum * (small + 1)] * larger
    sizes[-1] += rest
    return tuple(sizes)


def make_plan(
    layout: Layout, element_size: int, device: str, training: bool, settings: Settings, costs: Costs | None
) -> Plan:
    """The plan of a layer through collectives: the first of `ranked`."""
    return ranked(layout, element_size, device, training, settings, costs)[0]


def ranked(
    layout: Layout, element_size: int, device: str, training: bool, settings: Settings, costs: Costs | None
) -> tuple[Plan, ...]:
    """All candidate plans of a layer through collectives, the predicted fastest first; `training` weighs the backward.

    Without `costs`, and at P = 1, nothing is predicted: the only one has the chunks that are asked for, or four even
    ones (one at P = 1). Raises ValueError where `A2A_FFN_CHUNKS` does not fit L.
    """
    if costs is None or layout.P == 1:
        quantum = border_quantum(device, layout.rows, layout.H)
        plan = Plan(chunk_sizes(layout.L, layout.P, settings, quantum), disabled=settings.disabled_passes)
        return (replace(plan, ahead=settings.in_flight or plan.ahead, reserved_sms=settings.reserved_sms or 0),)
    return ranked_on(_machine(device, costs), layout, element_size, device, training, settings)


@functools.lru_cache(maxsize=1024)
def ranked_on(
    machine: Machine, layout: Layout, element_size: int, device: str, training: bool, settings: Settings
) -> tuple[Plan, ...]:
    """`ranked` on a known machine.

    Of the plans within `AS_FAST` of the fastest, the one with the fewest chunks comes first. The unchunked plan is
    among them unless `settings` ask for chunks.
    """
    unchunked = simulate(Case(machine, layout, Plan((layout.L,)), itemsize=element_size))
    ratio = min(MAX_RATIO_16THS, max(1, round(16 * unchunked.communication / 2 / unchunked.layer)))
    plans = []
    for sizes in dict.fromkeys(_candidate_sizes(layout, settings, border_quantum(device, layout.rows, layout.H))):
        overlaps = device == "cuda" and len(sizes) > 1
        reserved = RESERVED_SMS if overlaps and ratio >= RESERVING_RATIO_16THS else 0
        reserved = reserved if settings.reserved_sms is None else settings.reserved_sms
        ahead = settings.in_flight or Plan.ahead
        plans.append(Plan(sizes, ratio, ahead, reserved_sms=reserved, disabled=settings.disabled_passes))
    predicted = {plan: simulate(Case(machine, layout, plan, training, element_size)).total for plan in plans}
    best = min(predicted.values())

    def order(plan: Plan) -> tuple[float, ...]:
        as_fast = predicted[plan] <= best * (1 + AS_FAST)
        return (0, len(plan.sizes), predicted[plan]) if as_fast else (1, predicted[plan])

    return tuple(sorted(plans, key=order))


def _machine(device: str, costs: Costs) -> Machine:
    """An H200 with what was measured on the group, or a CPU: its GEMMs' rate, with `CPU_PER_GEMM` for the rest."""
    machine = machine_of().with_costs(costs)
    if device == "cuda":
        return machine
    cpu = Gpu("CPU", 1, costs.flops_per_s / CPU_PER_GEMM, math.inf, overhead_k=0)
    return replace(machine, gpu=cpu, local=replace(machine.local, sm_share=0.0))


def _candidate_sizes(layout: Layout, settings: Settings, quantum: int) -> Iterator[tuple[int, ...]]:
    """Chunk sizes worth simulating: even ones, and with smaller ends, since nothing hides the ends' exchanges."""
    fixed = settings.sizes or settings.chunks
    for count in (None,) if fixed else CANDIDATE_CHUNKS:
        asked = settings if fixed else replace(settings, chunks=count)
        sizes = chunk_sizes(layout.L, layout.P, asked, quantum)
        yield sizes
        end = min(sizes) // 2
        large_enough = end >= max(MIN_TOKENS, SMALLEST_END / layout.rows)
        if settings.sizes or quantum > 1 or not large_enough:
            continue
        for between in (len(sizes) - 2,) if fixed else (len(sizes) - 2, len(sizes) - 1):
            if between > 0:
                inner, rest = divmod(layout.L - 2 * end, between)
                yield (end, *(inner + (i < rest) for i in range(between)), end)


def peer_plan(layout: Layout, device: str, settings: Settings, training: bool, element_size: int) -> Plan:
    """The plan of a layer that exchanges through the peers' memory of one host: one chunk, unless asked otherwise.

    Tiles are combined as they are done, so there is only the dispatch to hide: 0.12 ms of the default workload's on H200s,
    under the first GEMM of its first tokens, whose count is the best by simulation (`Plan.head`), or under that of the
    rank's own rows if it is asked for. That is not the default: in the one comparison, the eager forward on two H200s,
    it cost 0.12 ms more than it hid, since half of the rows fill the GEMM's tiles badly.
    """
    quantum = border_quantum(device, layout.rows, layout.H)
    asked = settings.sizes or settings.chunks
    sizes = chunk_sizes(layout.L, layout.P, settings, quantum) if asked else (layout.L,)
    ahead, own_first = settings.in_flight or Plan.ahead, settings.own_first
    plan = Plan(sizes, ratio_16ths=1, ahead=ahead, peers=True, own_first=own_first, disabled=settings.disabled_passes)
    if own_first:
        return plan
    if settings.head is None:
        return replace(plan, head=_head(layout, plan, training, element_size))
    asked = replace(plan, head=settings.head)
    return asked if any(asked.stored(size) < size for size in sizes) else plan


@functools.lru_cache(maxsize=1024)
def _head(layout: Layout, plan: Plan, training: bool, element_size: int) -> int:
    """The `Plan.head` of the shortest simulation on H200s; 0 unless it saves enough."""
    heads = [head for head in HEADS if plan.sizes[0] - head >= MIN_TOKENS]
    plans = [plan, *(replace(plan, head=head) for head in heads)]
    times = [simulate(Case(machine_of(), layout, each, training, element_size)).total for each in plans]
    best = min(range(len(plans)), key=times.__getitem__)
    return plans[best].head if times[best] <= times[0] - 3 * layout.P * HEAD_LAUNCH_S else 0


def exact_gradients(device: str, settings: Settings) -> bool:
    """Whether `eager_exact` takes every gradient as eager does: on CPU, or where it is asked for.

    ATen's CPU kernel accumulates the norm weights' gradients in the tensors' dtype: in bf16 a sum in another order
    differs by several percent from a thousand rows on. The CUDA kernels accumulate in fp32.
    """
    return device == "cpu" if settings.gradients is None else settings.gradients == "exact"


def decomposed(layout: Layout, inputs: torch.Tensor) -> str | None:
    """Why compiled code would not multiply as ATen does, or None: Inductor has other code for vectors, on CPU."""
    if inputs.device.type == "cpu" and (layout.rows == 1 or layout.D == 1):
        return "on CPU, Inductor multiplies by a vector (P*B = 1 or D = 1) in another order than ATen"
    return None


def unsupported(ffn: Any, inputs: torch.Tensor) -> str | None:
    """Why the layer does not take this valid call, or None: the reference answers it then."""
    if ffn.fwd_mode != "dense_v2" or ffn.bwd_mode != "dense_v2":
        return f"fwd_mode/bwd_mode {ffn.fwd_mode}/{ffn.bwd_mode} is not dense_v2"
    if ffn.gemm_backend != "bmm":
        return f"gemm_backend {ffn.gemm_backend} is not bmm"
    for tensor in (inputs, ffn.w1, ffn.b1, ffn.wout, ffn.bout):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"a {type(tensor).__name__} is among the inputs and weights"
    for norm in (ffn.norm_x, ffn.norm_gate):
        if norm.weight is None or norm.bias is None:
            return "a norm has no weight or no bias"
        if is_altered(norm):
            return "a norm has hooks, or a forward of its own"
        if norm.weight.dtype != inputs.dtype or norm.bias.dtype != inputs.dtype:
            return f"norm weights are {norm.weight.dtype} beside inputs of {inputs.dtype}"
        if norm.weight.numel() * 2 != ffn.w1.shape[2]:
            return "a norm does not span H"
    for parameter in (ffn.w1, ffn.b1, ffn.wout, ffn.bout):
        if parameter.dtype != inputs.dtype:
            return f"weights are {parameter.dtype} beside inputs of {inputs.dtype}"
    if torch.is_autocast_enabled(inputs.device.type):
        return "autocast is on"
    return None
