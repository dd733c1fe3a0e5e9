"""What exchanges and GEMMs cost on this group: measured once, agreed by all its ranks, rounded so that plans repeat.

Only NCCL groups are measured. Elsewhere, and where `A2A_FFN_COSTS` says what to assume, nothing is run.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from . import group as groups

SMALL, LARGE = 1 << 16, 1 << 24  # bytes that a rank sends
REPEATS = 5


class Costs(NamedTuple):
    """Seconds an empty exchange takes, bytes a second that a rank sends, and GEMM operations a second."""

    latency_s: float
    bytes_per_s: float
    flops_per_s: float


_MEASURED: dict[tuple[str, torch.dtype], Costs] = {}


def costs_of(group: Any, P: int, device: torch.device, dtype: torch.dtype) -> Costs | None:
    """The costs on this group, measured at its first call, in which all ranks take part; None where none are known."""
    if P == 1 or dist.get_backend(group) != "nccl":
        return None
    key = (groups.group_name(group), dtype)
    if key not in _MEASURED:
        small, large = (_seconds(_exchange(group, P, device, size)) for size in (SMALL, LARGE))
        own = torch.tensor([small, large, _seconds(_gemm(device, dtype)) / _GEMM_FLOPS], device=device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
        small, large, per_flop = own.tolist()
        per_byte = max(large - small, 0.1 * large) / (LARGE - SMALL)
        _MEASURED[key] = rounded(Costs(max(small - SMALL * per_byte, 1e-6), 1 / per_byte, 1 / per_flop))
    return _MEASURED[key]


def rounded(costs: Costs) -> Costs:
    """Each value to the nearest power of the square root of two: noise seldom changes a plan, or a cache key."""
    return Costs(*(2.0 ** (round(2 * math.log2(value)) / 2) for value in costs))


def _exchange(group: Any, P: int, device: torch.device, size: int) -> Callable[[], Any]:
    send = torch.zeros((P, size // (4 * (P - 1))), device=device)  # a rank keeps its own block
    received = torch.empty_like(send)
    return lambda: dist.all_to_all_single(received, send, group=group)


_GEMM_SHAPE = (16, 1024, 1024, 2048)
_GEMM_FLOPS = 2 * math.prod(_GEMM_SHAPE)


def _gemm(device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    batch, rows, inner, columns = _GEMM_SHAPE
    left = torch.zeros((batch, rows, inner), dtype=dtype, device=device)
    right = torch.zeros((batch, inner, columns), dtype=dtype, device=device)
    return lambda: torch.bmm(left, right)


def _seconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the device, after two calls to warm up."""
    times = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[2:])[REPEATS // 2]
