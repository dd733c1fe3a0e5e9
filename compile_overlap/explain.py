"""What the layer does for a call, and why: a readable text, or only the plan."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import api, known_plans, plan, probe
from .config import PEERS, Settings
from .costs import Costs
from .layout import Layout, check_call
from .recipes import ADD, EAGER_EXACT, INDUCTOR, NORM
from .schedule import FORWARD, START, Plan, Work, build


def explain(ffn: Any, inputs: torch.Tensor) -> str:
    """Layout, the plan and its origin, recipe, transport, GEMMs, and what fell back, for `forward_ffn(ffn, inputs)` in
    the current grad mode.

    Takes the decision if it has not been taken yet, so every rank of the group must call it.
    """
    with api.telling("explain", ffn, inputs):
        return _explained(ffn, inputs)


def _explained(ffn: Any, inputs: torch.Tensor) -> str:
    layout = check_call(ffn, inputs)
    settings = Settings.from_environment()
    reason = plan.unsupported(ffn, inputs)
    api.agree_on_call(ffn.ep_group, layout, inputs.dtype, reason)
    decision = None if reason else api.decide(ffn, inputs, layout, settings)
    if decision is not None and decision.recipe is None:
        reason = decision.reason
    taken = decision is not None and reason is None
    candidate = (decision.recipe, decision.bias) if taken else (INDUCTOR, ADD)
    chosen = api.plan_for(ffn, layout, settings, candidate)
    sizes = chosen.sizes
    sent = layout.exchange_bytes(inputs.element_size())
    lines = [
        f"layout     P={layout.P} B={layout.B} T={layout.T} D={layout.D} H={layout.H} L={layout.L}, {inputs.dtype}, "
        f"{inputs.device.type}, grad {'on' if torch.is_grad_enabled() else 'off'}",
        f"chunks     {len(sizes)} along L, of {', '.join(map(str, sizes))} tokens",
        f"schedule   {_schedule(chosen, layout, sent)}",
        f"plan       {chosen}",
        f"origin     {_origin(ffn, api.problem_of(ffn, layout, settings, candidate), chosen)}",
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


def plan_of(ffn: Any, inputs: torch.Tensor, *, compiled: bool = False) -> str | None:
    """The plan with which calls like `forward_ffn(ffn, inputs)` ran, in the current grad mode and with these settings.

    `compiled`: as an outer `torch.compile` inlined them; otherwise as eager calls. It is read off the exchanges of the
    layer that was made for them last. None where there is no such layer: not called yet, nothing exchanged, or answered
    by the reference. Takes the decision for eager calls if it has not been taken yet, so every rank of the group must
    call it.
    """
    with api.telling("plan_of", ffn, inputs):
        return _plan_of(ffn, inputs, compiled)


def _plan_of(ffn: Any, inputs: torch.Tensor, compiled: bool) -> str | None:
    layout, settings = check_call(ffn, inputs), Settings.from_environment()
    if layout.P == 1 or plan.unsupported(ffn, inputs) or plan.decomposed(layout, inputs):
        return None
    if compiled:
        candidate = INDUCTOR, settings.bias or probe.observed_bias_form(ffn)
    else:
        decision = api.decide(ffn, inputs, layout, settings)
        candidate = decision.recipe, decision.bias
    ran = api.plan_that_ran(ffn.ep_group, api.problem_of(ffn, layout, settings, candidate))
    return None if ran is None else str(ran)


def _schedule(chosen: Plan, layout: Layout, sent: int) -> str:
    if layout.P == 1:
        return "nothing to overlap"
    forward = build(FORWARD, chosen, (Work(2),) * len(chosen.sizes))
    order = " ".join(forward.label(step) for step in forward.steps if step.kind == START)
    in_flight = _size(2 * sent * forward.in_flight() // layout.L)
    off = f"; off: {', '.join(chosen.disabled)}" if chosen.disabled else ""
    return f"exchanges start in the order {order}; at most {in_flight} of dispatches, packed and received, in flight{off}"


def _origin(ffn: Any, problem: known_plans.Problem, chosen: Plan) -> str:
    """Where the plan comes from: the settings, a tuning, or a prediction by costs, and how old these are."""
    group, device, settings, P = ffn.ep_group, ffn.w1.device, problem.settings, problem.layout.P
    if P == 1 or settings.sizes or settings.chunks:
        return "set by A2A_FFN_CHUNKS" if settings.sizes or settings.chunks else "one rank has one chunk"
    known = known_plans.tuned_plan(group, device, problem)
    if known is not None and (known.value.plan.sizes, known.value.plan.peers) == (chosen.sizes, chosen.peers):
        tuned, where = known.value, _where(known)
        times = f"{tuned.seconds * 1e3:.4g} ms, the unchunked plan {tuned.unchunked_seconds * 1e3:.4g} ms"
        return f"tuned {_age(tuned.created)} ago ({where}): {times}"
    if chosen.peers:
        return "the default through the peers' memory; not tuned"
    if settings.costs:
        return f"the fastest by simulation, with the costs of A2A_FFN_COSTS ({_costs(settings.costs)}); not tuned"
    measured = known_plans.costs(group, P, device, problem.dtype)
    if measured is None:
        return "the default where no costs are measured; not tuned"
    found = f"measured {_age(measured.value.created)} ago ({_where(measured)}; {_costs(measured.value.costs)})"
    return f"the fastest by simulation, with costs {found}; not tuned"


def _where(known: known_plans.Known) -> str:
    return "stored" if known.stored else "in this process"


def _age(created: int) -> str:
    seconds = max(0, int(time.time()) - created)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} seconds"


def _costs(costs: Costs) -> str:
    latency, link, rate = costs.latency_s * 1e6, costs.bytes_per_s / 1e9, costs.flops_per_s / 1e12
    return f"{latency:.3g} us, {link:.3g} GB/s, {rate:.3g} TFLOP/s"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _transport(P: int, inputs: torch.Tensor, chosen: Plan, settings: Settings) -> str:
    if P == 1:
        return "none: one rank, the exchange is a local layout change"
    if chosen.peers:
        first = "; the first GEMM begins with the nearest rows" if chosen.own_first else ""
        first = f"; the first GEMM begins with {chosen.head} tokens" if chosen.head else first
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
