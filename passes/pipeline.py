"""The passes, in order, and how they reach Inductor: process-wide, and in our own backend.

An outer `torch.compile` inlines the layer and ignores an inner backend, so the hooks are installed in Inductor's
configuration for the whole process. They act only on graphs that hold an exchange of ours, and a hook that somebody
else installed before keeps running, first.

| hook                               | passes                                                                                     |
| ---------------------------------- | ------------------------------------------------------------------------------------------ |
| `joint_custom_post_pass`           | LocalizeViews                                                                              |
| `post_grad_custom_post_pass`       | CheckExchanges, Reorder, InPlaceGradients, ReserveSMs, LowerToPeers, ShareKernels, OneCall |
| `_pre_fusion_custom_pass`          | PinOrder, CallDirectly                                                                     |
| every wrapper that Inductor writes | verify                                                                                     |

A layer switches passes off by name (`A2A_FFN_DISABLE_PASSES`); the names travel in its plan, so in the graph itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch._inductor.config as inductor_config

from compile_overlap import compat, peers
from compile_overlap.kernels import chunk_gemm

from . import verify
from .base import Chain, GraphChain, PassReport, SchedulerChain
from .call_directly import CallDirectly
from .check_exchanges import CheckExchanges
from .localize_views import LocalizeViews
from .lower_gemms import InPlaceGradients, ReserveSMs
from .lower_to_peers import LowerToPeers
from .one_call import OneCall
from .pin_order import PinOrder
from .reorder import Reorder
from .share_kernels import ShareKernels

_LOG: deque[PassReport] = deque(maxlen=4096)
_HOOKS: dict[str, Any] = {
    "joint_custom_post_pass": (GraphChain, (LocalizeViews(),)),
    "post_grad_custom_post_pass": (
        GraphChain,
        (
            CheckExchanges(), Reorder(), InPlaceGradients(), ReserveSMs(), LowerToPeers(), ShareKernels(), OneCall(),
        ),  # fmt: skip
    ),
    "_pre_fusion_custom_pass": (SchedulerChain, (PinOrder(), CallDirectly())),
}
PASS_NAMES = tuple(each.name for _, passes in _HOOKS.values() for each in passes)
_watching = False


def _record(report: PassReport) -> None:
    _LOG.append(report)


def pass_log() -> tuple[PassReport, ...]:
    """What the passes did in this process, oldest first (the newest 4096 runs that matched something)."""
    return tuple(_LOG)


def _uuid() -> Any:
    """Our passes' uuids and those of other people's hooks that ours run after; None, uncached, if one of them has none.

    The same for every hook, since 2.6.0 leaves the scheduler's out of the cache key.
    """
    others = []
    for hook in _HOOKS:
        present = getattr(inductor_config, hook)
        before = present.before if isinstance(present, Chain) else present
        if before is not None:
            others.append(before.uuid() if hasattr(before, "uuid") else None)
    ours = [each.uuid() for _, passes in _HOOKS.values() for each in passes]
    return None if None in others else (tuple(ours), tuple(others))


def _chained(hook: str) -> Any:
    kind, passes = _HOOKS[hook]
    present = getattr(inductor_config, hook)
    return present if isinstance(present, Chain) else kind(present, passes, _record, _uuid)


def config_patches() -> dict[str, Any]:
    """Inductor configuration under which the passes run after whatever hooks are installed."""
    return {hook: _chained(hook) for hook in _HOOKS}


def install() -> None:
    """Make sure that the hooks are in Inductor's process-wide configuration; a second call changes nothing."""
    global _watching
    compat.constrain_all_to_all_strides()
    chunk_gemm.register_lowering()
    peers.register_lowering()
    if not _watching:
        compat.watch_wrappers(lambda code: verify.check_wrapper(code, _record))
        _watching = True
    for hook, chain in config_patches().items():
        if getattr(inductor_config, hook) is not chain:
            setattr(inductor_config, hook, chain)
