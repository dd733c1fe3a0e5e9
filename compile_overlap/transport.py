"""Which way the exchanges of a layer go: decided for a whole group, at the point where all its ranks make the plan."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Iterator

import torch
import torch.distributed as dist

from . import group as groups
from . import gemms, known_plans, norms, notice, peers, plan, rooms
from .config import CUBLAS, PEERS, require_divisor
from .costs import Costs
from .kernels import gemm_combine
from .known_plans import Problem
from .layout import Layout
from .recipes import ADD, INDUCTOR
from .schedule import BACKWARD, FORWARD, Plan


def plan_for(group: Any, rank: int, device: torch.device, problem: Problem) -> Plan:
    """The plan of a layer on this group, with buffers for it where it exchanges through the peers' memory.

    The plan that was tuned for this problem, or else the one that the settings and the group's costs give. A group's
    first plan measures the group, and each plan's decision is the group's: all its ranks call this together. Raises
    ValueError where `A2A_FFN_RANKS_PER_HOST` does not divide P.
    """
    require_divisor(problem.settings.ranks_per_host, problem.layout.P)
    chosen = _as_tuned(group, rank, device, problem)
    chosen = chosen or _exchanging(group, rank, device, problem)
    return _completed(group, rank, device, problem, chosen)


def _completed(group, rank: int, device: torch.device, problem: Problem, chosen: Plan) -> Plan:
    """The plan with what runs by our kernels, and with its first GEMM in parts only where that changes no bit."""
    layout, dtype, training, recipe, bias, _, settings = problem
    own = ()
    if settings.gemms != CUBLAS and not chosen.reserved_sms:  # our GEMM takes all SMs
        own += gemms.agreed(group, layout, chosen.sizes, dtype, device, training, bias)
    if recipe == INDUCTOR and settings.norm != INDUCTOR:
        own += norms.agreed(group, layout, dtype, device, training, bias)
    chosen = replace(chosen, triton=own)
    if (chosen.own_first or chosen.head) and not _parts_agree(
        group, layout, chosen, dtype, device, training, bias, settings.ranks_per_host
    ):
        chosen = replace(chosen, own_first=False, head=0)
    asked = (settings.own_first and not chosen.own_first) or (settings.head and not chosen.head)
    if asked and chosen.peers and rank == 0:
        why = "no first GEMM has such parts, or equals itself in them"
        notice.warn_once(f"A2A_FFN_OWN_FIRST, A2A_FFN_HEAD are without effect: {why}")
    return chosen


def _as_tuned(group, rank: int, device: torch.device, problem: Problem) -> Plan | None:
    """The plan that was tuned for this problem; None where none was, or the group has no peers' memory for it now."""
    known = known_plans.tuned_plan(group, device, problem)
    if known is None:
        return None
    layout, dtype, training, _, bias, _, settings = problem
    chosen = replace(known.value.plan, disabled=settings.disabled_passes)
    reason = None
    if chosen.peers:
        reason = _obstacle(group, layout, dtype, device, training, bias, chosen.sizes, settings.ranks_per_host)
    if reason is not None and rank == 0:
        notice.warn_once(f"the tuned plan {chosen} is not taken: {reason}")
    return chosen if reason is None else None


def candidates(
    group: Any, rank: int, device: torch.device, problem: Problem, most: int | None = None
) -> tuple[Plan, ...]:  # fmt: skip
    """The plans worth timing for a layer, the unchunked one first: all ranks of the group call this together.

    The `most` best through collectives, by prediction (None: all), and through the peers' memory, where the settings
    leave or ask for it and the group can, whole and in two chunks, the first dispatch in parts and as a whole.
    """
    layout, dtype, training, _, bias, _, settings = problem
    chosen = []
    if settings.transport in (None, PEERS) and _not_lowered(problem) is None:
        for chunks in (1, 2):
            by_peers = _by_peers(group, layout, dtype, device, training, replace(settings, chunks=chunks))
            hosts = settings.ranks_per_host
            if _obstacle(group, layout, dtype, device, training, bias, by_peers.sizes, hosts) is None:
                chosen.append(by_peers)
                if by_peers.head and settings.head is None:
                    chosen.append(replace(by_peers, head=0))
    if settings.transport != PEERS or not chosen:
        chosen += _ranked(group, layout, dtype, device, training, settings, most)
    chosen.sort(key=lambda each: (len(each.sizes) > 1, each.peers))
    return tuple(dict.fromkeys(_completed(group, rank, device, problem, each) for each in chosen))


def _ranked(group, layout, dtype, device, training, settings, most: int | None) -> list[Plan]:
    """The best plans through collectives and the unchunked one; even chunks where nothing can be predicted."""
    costs = _costs(group, layout, dtype, device, settings)
    asked = (settings,) if costs is not None else (replace(settings, chunks=count) for count in plan.CANDIDATE_CHUNKS)
    ranked = [each for one in asked for each in plan.ranked(layout, dtype.itemsize, device.type, training, one, costs)]
    unchunked = plan.ranked(layout, dtype.itemsize, device.type, training, replace(settings, chunks=1), costs)
    return list(dict.fromkeys((*ranked[:most], *unchunked)))


def _exchanging(group, rank, device, problem: Problem) -> Plan:
    layout, dtype, training, _, bias, _, settings = problem
    asked = settings.transport == PEERS and layout.P > 1
    if asked or _peers_by_default(group, device, problem):
        chosen = _by_peers(group, layout, dtype, device, training, settings)
        reason = _not_lowered(problem)
        reason = reason or _obstacle(group, layout, dtype, device, training, bias, chosen.sizes, settings.ranks_per_host)
        if reason is None:
            return chosen
        notice.fall_back(reason, strict=asked and settings.strict, rank=rank)
    return _by_collectives(group, layout, dtype, device, training, settings)


def _not_lowered(problem: Problem) -> str | None:
    """Why `passes.lower_to_peers` would leave such a layer to the collectives, whatever the group can; or None."""
    if "pin-order" in problem.settings.disabled_passes:
        return "pin-order is switched off"
    return None if problem.comm_scale == 1 else f"comm_scale = {problem.comm_scale} pads what it sends"


def _peers_by_default(group, device: torch.device, problem: Problem) -> bool:
    """Among the GPUs of one host, unless a pass that it needs is switched off."""
    layout, settings = problem.layout, problem.settings
    off = _not_lowered(problem) or "lower-to-peers" in settings.disabled_passes
    if layout.P == 1 or settings.transport is not None or device.type != "cuda" or off:
        return False
    return len(rooms.domain_of(group, layout.P, device, settings.ranks_per_host)) == layout.P


def _by_peers(group, layout, dtype, device, training, settings) -> Plan:
    """On one host a plan for it; where a part goes through collectives, these are what there is to hide."""
    if len(rooms.domain_of(group, layout.P, device, settings.ranks_per_host)) == layout.P:
        return plan.peer_plan(layout, device.type, settings, training, dtype.itemsize)
    chosen = _by_collectives(group, layout, dtype, device, training, settings)
    return replace(chosen, peers=True, own_first=settings.own_first, reserved_sms=0)


def _by_collectives(group, layout, dtype, device, training, settings) -> Plan:
    costs = _costs(group, layout, dtype, device, settings)
    return plan.make_plan(layout, dtype.itemsize, device.type, training, settings, costs)


def _costs(group, layout, dtype, device, settings) -> Costs | None:
    known = None if settings.costs else known_plans.costs(group, layout.P, device, dtype)
    return known.value.costs if known else settings.costs


_DECIDED: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def _obstacle(
    group, layout: Layout, dtype, device, training: bool, bias: str, sizes: tuple[int, ...], per_host: int | None
) -> str | None:
    """Why a layer of this group goes through collectives, or None and there are buffers; decided once by all ranks."""
    decided = _DECIDED.setdefault(dist.group.WORLD if group is None else group, {})
    key = (layout, dtype, device, training, bias, sizes, per_host)
    if key not in decided:
        reason = rooms.obstacle(group, layout.P, device, dtype, per_host)
        if reason is None:
            shapes = _gemms(layout, training, bias, sizes)
            _, reason = groups.attempt(group, layout.P, device, lambda: _check(shapes, dtype, device))
        if reason is None:
            nbytes = layout.B * layout.T * layout.D * dtype.itemsize
            reason = rooms.make_room(group, layout.P, nbytes, device, per_host)
        decided[key] = reason
    return decided[key]


def _check(shapes: Iterator[tuple], dtype: torch.dtype, device: torch.device) -> None:
    """Run these GEMMs by the kernel. Raises RuntimeError where it rounds otherwise than cuBLAS, or what Triton raises."""
    for shape in shapes:
        if not gemm_combine.agrees_with_cublas(*shape, dtype, device):
            raise RuntimeError(f"cuBLAS sums in another order than the kernel for {shape}")


def _gemms(layout: Layout, training: bool, bias: str, sizes: tuple[int, ...]) -> Iterator[tuple]:
    """(tokens, rows, K, columns, transposed, bias form) of the GEMMs that the plan's layer stores to its peers."""
    form = gemm_combine.ADD if bias == ADD else gemm_combine.BADDBMM
    for size in sorted(set(sizes)):
        yield size, layout.rows, layout.H, layout.D, False, form
        if training:
            yield size, layout.rows, 2 * layout.H, layout.D, True, gemm_combine.NO_BIAS


def _parts_agree(
    group, layout: Layout, chosen: Plan, dtype, device, training: bool, bias: str, per_host: int | None
) -> bool:
    """Whether a first GEMM in the plan's parts equals the whole one; decided once by all ranks."""
    decided = _IN_PARTS.setdefault(dist.group.WORLD if group is None else group, {})
    key = (layout, chosen.sizes, chosen.head, chosen.triton, dtype, device, training, bias, per_host)
    if key not in decided:
        domain = rooms.domain_of(group, layout.P, device, per_host)
        # Which chunk is first depends on the direction.
        heads = {size: 0 if chosen.own_first else chosen.stored(size) for size in chosen.sizes}
        heads = {size: head for size, head in heads.items() if head < size}

        def check():
            rank = dist.get_rank(group)
            directions = ((FORWARD, layout.D, 2 * layout.H),) if bias == ADD else ()
            directions += ((BACKWARD, layout.D, layout.H),) if training else ()
            return bool(directions) and all(
                peers.parts_agree(
                    size, head, layout.B, layout.P, rank, domain, inner, columns, direction == BACKWARD,
                    direction in chosen.triton, dtype, device,
                )
                for direction, inner, columns in directions
                for size, head in heads.items()
            )  # fmt: skip

        agree, _ = groups.attempt(group, layout.P, device, check)
        decided[key] = groups.all_ranks(group, layout.P, device, bool(agree))
    return decided[key]


_IN_PARTS: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def reset() -> None:
    """Forget what was decided and measured. Buffers stay: an outer `torch.compile`'s code and backwards to come use them."""
    _DECIDED.clear()
    _IN_PARTS.clear()
    gemms.reset()
    known_plans.reset()
    norms.reset()
