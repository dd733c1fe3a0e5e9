"""The expert-parallel group: its alias for our exchanges, and decisions that all its ranks take alike."""

from __future__ import annotations

import hashlib
import json
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


ELSEWHERE = "another rank cannot"


def attempt(group: Any, size: int, device: torch.device, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what `call()` returns, None) where it raises on no rank of the group; else (None, why) on every rank.

    Why is what it raised here, or `ELSEWHERE`.
    """
    value = failure = None
    try:
        value = call()
    except Exception as error:  # whatever it raises, the other ranks wait for the verdict
        failure = str(error) or type(error).__name__
    if all_ranks(group, size, device, failure is None):
        return value, None
    return None, failure or ELSEWHERE


def from_first(group: Any, device: torch.device, call: Callable[[], Any]) -> Any:
    """What `call()` returns on the group's first rank, of JSON's types, on every rank: two small broadcasts.

    Raises ValueError on every rank where it raises anything.
    """
    answer = b""
    if dist.get_rank(group) == 0:
        try:
            answer = json.dumps([True, call()]).encode()
        except Exception as error:  # whatever it raises, the other ranks wait for an answer
            answer = json.dumps([False, str(error) or type(error).__name__]).encode()
    source = dist.get_global_rank(dist.group.WORLD if group is None else group, 0)
    length = torch.tensor([len(answer)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=group)
    text = torch.tensor(list(answer.ljust(int(length))), dtype=torch.uint8, device=device)
    dist.broadcast(text, source, group=group)
    # Nothing arrives over a group that only pretends to have other ranks (the fake backend).
    found, value = json.loads(bytes(text.tolist())) if int(length) else (True, None)
    if not found:
        raise ValueError(value)
    return value


def all_ranks(group: Any, size: int, device: torch.device, flag: bool) -> bool:
    """Whether `flag` holds on every rank of the group: one small all-reduce."""
    if size == 1:
        return flag
    verdict = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())
