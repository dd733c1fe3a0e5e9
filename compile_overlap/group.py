"""The expert-parallel group: its alias for our exchanges, and decisions that all its ranks take alike."""

from __future__ import annotations

import hashlib
from typing import Any, Callable

import torch
import torch.distributed as dist

from passes import graphs

from . import compat
from .schedule import Plan


def group_name(group: Any) -> str:
    """The registered name of `group`, or of the default group for None."""
    return (dist.group.WORLD if group is None else group).group_name


def overlap_alias(group: Any, plan: Plan) -> str:
    """The name our exchanges use for `group` (None: the default group); registered so that it resolves."""
    group = dist.group.WORLD if group is None else group
    name = graphs.alias(group_name(group), plan)
    compat.register_group_alias(name, group)
    return name


def gathered(group: Any, size: int, device: torch.device, value: Any) -> list[int]:
    """A digest of each rank's `repr(value)`, in the order of the group: one small all-gather."""
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    found = mine.repeat(size)
    dist.all_gather_into_tensor(found, mine, group=group)
    return found.tolist()


def attempt(group: Any, size: int, device: torch.device, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what `call()` returns, None) where it raises on no rank of the group; else (None, why) on every rank."""
    value = failure = None
    try:
        value = call()
    except Exception as error:  # whatever it raises, the other ranks wait for the verdict
        failure = str(error) or type(error).__name__
    if all_ranks(group, size, device, failure is None):
        return value, None
    return None, failure or "another rank cannot"


def all_ranks(group: Any, size: int, device: torch.device, flag: bool) -> bool:
    """Whether `flag` holds on every rank of the group: one small all-reduce."""
    if size == 1:
        return flag
    verdict = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())
