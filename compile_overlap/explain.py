"""One readable text about what the layer does for a call, and why."""

from __future__ import annotations

from typing import Any

import torch

from . import api, plan
from .config import PEERS, Settings
from .layout import Layout, check_call
from .recipes import ADD, EAGER_EXACT, INDUCTOR, NORM
from .schedule import FORWARD, START, Plan, Work, build


def explain(ffn: Any, inputs: torch.Tensor) -> str:
    """Layout, chunks, recipe, transport, GEMMs, and what fell back, for `forward_ffn(ffn, inputs)` in the current grad mode.

    Takes the decision if it has not been taken yet, so every rank of the group must call it.
    """
    layout = check_call(ffn, inputs)
    settings = Settings.from_environment()
    reason = plan.unsupported(ffn, inputs)
    api.agree_on_call(ffn.ep_group, layout, inputs.dtype, reason)
    decision = None if reason else api.decide(ffn, inputs, layout, settings)
    if decision is not None and decision.recipe is None:
        reason = decision.reason
    taken = decision is not None and reason is None
    chosen = api.plan_for(ffn, layout, settings, (decision.recipe, decision.bias) if taken else (INDUCTOR, ADD))
    sizes = chosen.sizes
    sent = layout.exchange_bytes(inputs.element_size())
    lines = [
        f"layout     P={layout.P} B={layout.B} T={layout.T} D={layout.D} H={layout.H} L={layout.L}, {inputs.dtype}, "
        f"{inputs.device.type}, grad {'on' if torch.is_grad_enabled() else 'off'}",
        f"chunks     {len(sizes)} along L, of {', '.join(map(str, sizes))} tokens",
        f"schedule   {_schedule(chosen, layout, sent)}",
        f"plan       {chosen}",
        f"exchange   {_size(sent)} sent per rank in each dispatch and each combine",
        f"transport  {_transport(layout.P, inputs, chosen, settings)}",
        f"gemms      {_gemms(inputs, chosen)}",
        f"norm       {_norm(inputs, chosen, taken and decision.recipe == EAGER_EXACT)}",
    ]
    if reason is not None:
        lines.append(f"recipe     none: the reference overlap='none' answers, because {reason}")
    else:
        lines.append(f"recipe     {decision.recipe}, bias form {decision.bias} ({decision.reason})")
    lines.append("compiled   inside an outer torch.compile the recipe is inductor, with the bias form of the reference")
    return "\n".join(lines)


def _schedule(chosen: Plan, layout: Layout, sent: int) -> str:
    if layout.P == 1:
        return "nothing to overlap"
    forward = build(FORWARD, chosen, (Work(2),) * len(chosen.sizes))
    order = " ".join(forward.label(step) for step in forward.steps if step.kind == START)
    in_flight = _size(2 * sent * forward.in_flight() // layout.L)
    off = f"; off: {', '.join(chosen.disabled)}" if chosen.disabled else ""
    return f"exchanges start in the order {order}; at most {in_flight} of dispatches, packed and received, in flight{off}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _transport(P: int, inputs: torch.Tensor, chosen: Plan, settings: Settings) -> str:
    if P == 1:
        return "none: one rank, the exchange is a local layout change"
    if chosen.peers:
        first = "; the first GEMM begins with the rank's own rows" if chosen.own_first else ""
        return f"the peers' memory: put straight into their inboxes, the second GEMM stores what it combines{first}"
    refused = "; the peers' memory was asked for, the log says why not" if settings.transport == PEERS else ""
    return f"functional collectives over {'NCCL' if inputs.is_cuda else 'gloo'}{refused}"


def _gemms(inputs: torch.Tensor, chosen: Plan) -> str:
    directions = (name for name in chosen.triton if not name.startswith(NORM))
    own = "".join(f"; each chunk's first one {direction} by our kernel" for direction in directions)
    return f"{'cuBLAS' if inputs.is_cuda else 'ATen'}{own}"


def _norm(inputs: torch.Tensor, chosen: Plan, exact: bool) -> str:
    order = next((name[len(NORM) :] for name in chosen.triton if name.startswith(NORM)), None)
    if order is not None:
        return f"our kernel, which sums in the order of Inductor's: lanes x warps = {order}"
    if exact:
        return "our kernel where it equals ATen's" if inputs.is_cuda else "ATen's"
    return "fused by Inductor"
