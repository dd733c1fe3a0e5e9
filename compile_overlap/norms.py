"""Which kernel computes the gated norm under the `inductor` recipe: found by comparing bits, and agreed by the group."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from . import compat
from . import group as groups
from .kernels import inductor_gated_norm
from .layout import Layout
from .recipes import ADD, NORM

_AGREED: weakref.WeakKeyDictionary[Any, dict[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def agreed(
    group: Any, layout: Layout, dtype: torch.dtype, device: torch.device, training: bool, bias: str
) -> tuple[str, ...]:  # fmt: skip
    """`norm1024x8`, say: our kernel with that order, where it equals Inductor's on every rank; empty where Inductor's stays.

    None where Inductor rounds as eager and trains: then it rounds what backward reads, which the probe does not see.
    Its shape is the whole layer's, as the reference's norm sees it, and not a chunk's. Probed at the first call for a
    layout, in which all ranks of the group take part.
    """
    if device.type != "cuda" or layout.P == 1 or (training and compat.rounds_as_eager()):
        return ()
    known = _AGREED.setdefault(dist.group.WORLD if group is None else group, {})
    key = (layout, dtype, device, training, bias, compat.rounds_as_eager())
    if key not in known:

        def probe():
            biased = bias == ADD
            return inductor_gated_norm.order_of(layout.L, layout.rows, layout.H, biased, training, dtype, device)

        found, _ = groups.attempt(group, layout.P, device, probe)
        known[key] = tuple(
            f"{NORM}{order.block}x{order.warps}"
            for order in inductor_gated_norm.ORDERS
            if groups.all_ranks(group, layout.P, device, found == order)
        )
    return known[key]


def reset() -> None:
    """Forget what was agreed."""
    _AGREED.clear()
