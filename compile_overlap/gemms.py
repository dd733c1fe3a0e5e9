"""Which GEMMs of a layer run by our own kernel instead of cuBLAS: measured per shape, and agreed by the group."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from . import group as groups
from .kernels import chunk_gemm_triton
from .layout import Layout
from .recipes import ADD
from .schedule import BACKWARD, FORWARD

# Operations below which a GEMM is not worth measuring: 0.04 ms on an H200, less than the host needs for a chunk.
LEAST_FLOPS = 2e10

_AGREED: weakref.WeakKeyDictionary[Any, dict[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def agreed(
    group: Any, layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, training: bool, bias: str
) -> tuple[str, ...]:  # fmt: skip
    """The directions in which each chunk's first GEMM runs by `chunk_bmm_triton`: where it is faster on every rank.

    Measured at the first call for a layout, in which all ranks of the group take part. A bias inside the product
    (`baddbmm`) leaves the forward's to cuBLAS.
    """
    if device.type != "cuda" or layout.P == 1:
        return ()
    rows, D, H = layout.rows, layout.D, layout.H
    first = {}
    if bias == ADD and 2 * layout.L * rows * D * 2 * H >= LEAST_FLOPS:
        first[FORWARD] = (rows, D, 2 * H, False)
    if training and 2 * layout.L * rows * D * H >= LEAST_FLOPS:
        first[BACKWARD] = (rows, D, H, True)
    if not first:
        return ()
    known = _AGREED.setdefault(dist.group.WORLD if group is None else group, {})
    key = (layout, sizes, dtype, device, training, bias)
    if key not in known:

        def measure():
            return [
                direction for direction, shape in first.items()
                if all(chunk_gemm_triton.beats_cublas(size, *shape, dtype, device) for size in set(sizes))
            ]  # fmt: skip

        faster, _ = groups.attempt(group, layout.P, device, measure)
        known[key] = tuple(
            each for each in first if groups.all_ranks(group, layout.P, device, each in (faster or ()))
        )
    return known[key]


def reset() -> None:
    """Forget what was measured."""
    _AGREED.clear()
