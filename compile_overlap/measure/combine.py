"""What the GEMMs that store into the peers' memory take when all their stores are local: the rest is communication."""

from __future__ import annotations

import functools

import torch

from ..kernels import gemm_combine
from ..layout import Layout
from ..ranges import exchange
from ..schedule import BACKWARD, START, Plan
from .naming import schedules_of


def local_combine_us(
    layout: Layout, plan: Plan, dtype: torch.dtype, device: torch.device, backward: bool
) -> dict[str, float]:
    """Microseconds of each chunk's `gemm_combine` with local stores, by its exchange's name; nothing runs beside it.

    Medians of `triton.testing.do_bench`, the L2 cache flushed before each call. Needs CUDA.
    """
    found = {}
    for schedule in schedules_of(plan, backward):
        reverse = schedule.direction == BACKWARD
        for step in schedule.steps:
            if step.kind == START and step.exchange == 2:
                size = plan.sizes[step.chunk]
                found[exchange(2, step.chunk, reverse)] = _median_us(layout, size, reverse, dtype, device)
    return found


def _median_us(layout: Layout, size: int, backward: bool, dtype: torch.dtype, device: torch.device) -> float:
    from triton.testing import do_bench

    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    inner = layout.H * (2 if backward else 1)
    left = draw((size, layout.rows, inner))
    right = draw((size, layout.D, inner)).transpose(1, 2) if backward else draw((size, inner, layout.D))
    bias = None if backward else draw((size, layout.D))
    form = gemm_combine.NO_BIAS if backward else gemm_combine.ADD
    results = draw((layout.P, layout.B, layout.T, layout.D))  # a block for each rank, all of them here
    addresses = torch.tensor([each.data_ptr() for each in results], device=device)
    store = functools.partial(gemm_combine.gemm_combine, left, right, bias, addresses, layout.B, layout.T, 0, form)
    return do_bench(store, return_mode="median") * 1e3
