"""`tune`: the plan of a layer by timing the best few on the layer itself, instead of by prediction alone.

The candidates are compiled, then timed in turns, so that drift of clocks and links meets all of them. Every sample is
the slowest rank's, so that all ranks hold the same times and choose alike. The plan is taken by later calls of this
process, and by later processes on such machines (`plan_store`).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator

import torch

from . import api, calls, faults, known_plans, notice, plan, probe, transport
from . import group as groups
from .board import OF_CALL
from .config import Settings
from .layout import check_call, require
from .plan_store import Tuned
from .recipes import EAGER_EXACT, INDUCTOR
from .schedule import Plan
from .timing import Stopwatch, slowest

WARMUP = 3
# A chunked plan has to be faster than the unchunked one by this share of its time, and by three standard errors.
MARGIN = 0.01
STANDARD_ERRORS = 3


@dataclass(frozen=True)
class Tuning:
    """What `tune` found. `seconds`: each plan's median of the slowest rank, the unchunked one's first; `path`: the file."""

    plan: Plan
    seconds: dict[Plan, float]
    rounds: int
    path: str | None

    def __str__(self) -> str:
        unchunked = next(iter(self.seconds))
        lines = [f"tuned: slowest rank's median of {self.rounds} rounds, ms"]
        ranked = sorted(self.seconds.items(), key=lambda item: item[1])
        within_noise = "" if ranked[0][0] == self.plan else ", since no other is faster by more than noise"
        for each, seconds in ranked:
            marks = ", unchunked" if each == unchunked else ""
            marks += f", taken{within_noise}" if each == self.plan else ""
            lines.append(f"{seconds * 1e3:>12.4f}  {each}{marks}")
        return "\n".join([*lines, f"kept in {self.path}" if self.path else "kept in this process only"])


def tune(ffn: Any, inputs: torch.Tensor, *, compiled: bool = False, most: int = 4, rounds: int = 20) -> Tuning:
    """Time the `most` best plans of `forward_ffn(ffn, inputs)` and the unchunked one, and take the fastest from now on.

    Forward and backward with gradients enabled, else the forward; inputs [B,T,D]. `compiled`: of the layer that an
    outer `torch.compile` inlines, which has to be tuned before it is compiled; otherwise of the one that eager calls
    take. Plans through the peers' memory are among them where the group can. Another plan than the unchunked one is
    taken only where it is faster by more than noise. Gradients that have been accumulated are left alone.

    All ranks of the group call this alike. Raises ValueError for bad input, for settings that leave nothing to choose,
    and where the reference would answer, before any exchange of the layer's.
    """
    with api.telling("tune", ffn, inputs):
        return _tune(ffn, inputs, compiled, most, rounds)


def _tune(ffn: Any, inputs: torch.Tensor, compiled: bool, most: int, rounds: int) -> Tuning:
    layout, settings = check_call(ffn, inputs), Settings.from_environment()
    arguments = {"compiled": compiled, "most": most, "rounds": rounds, "settings": settings}
    training = torch.is_grad_enabled()
    reason = plan.unsupported(ffn, inputs) or plan.decomposed(layout, inputs)
    about = {"layout": layout, "dtype": inputs.dtype, "gradients": training, "not overlapped, because": reason, **arguments}
    faults.agree(ffn.ep_group, layout.P, "tune", about)
    for name, value in (("most", most), ("rounds", rounds)):
        require(type(value) is int and value >= 1, name, value, "a count of at least 1")
    require(layout.P > 1, "ffn.ep_group_size", layout.P, "at least 2: one rank has nothing to overlap")
    set_chunks = settings.sizes or settings.chunks
    require(not set_chunks, "A2A_FFN_CHUNKS", set_chunks, "unset to tune")
    require(reason is None, "ffn", type(ffn).__name__, f"a layer that is overlapped, but {reason}")
    known_plans.check_folder(ffn.ep_group, inputs.device)

    problem = api.problem_of(ffn, layout, settings, candidate_of(ffn, inputs, layout, settings, compiled))
    plans = transport.candidates(ffn.ep_group, ffn.ep_index, inputs.device, problem, most)
    measured = measure(ffn, inputs, problem, plans, rounds)
    taken = fastest(measured)
    seconds = {each: statistics.median(samples) for each, samples in measured.items()}
    unchunked = next(iter(seconds.values()))
    tuned = Tuned(replace(taken, triton=(), disabled=()), seconds[taken], unchunked, int(time.time()))
    path = known_plans.keep(ffn.ep_group, inputs.device, problem, tuned)
    calls.reset()
    return Tuning(taken, seconds, rounds, path)


def candidate_of(ffn: Any, inputs: torch.Tensor, layout: Any, settings: Settings, compiled: bool) -> probe.Candidate:
    """The recipe and bias form that answer such calls. Raises ValueError where the reference does."""
    overlapped = f"ffn = {type(ffn).__name__}: must be a layer that is overlapped"
    if compiled:
        allowed = f"{INDUCTOR} inside an outer torch.compile"
        require(settings.recipe != EAGER_EXACT, "A2A_FFN_RECIPE", settings.recipe, allowed)
        form = settings.bias or probe.observed_bias_form(ffn)
        reason = probe.difference_from_reference(ffn, form)
        if not groups.all_ranks(ffn.ep_group, layout.P, inputs.device, reason is None):
            raise ValueError(f"{overlapped}, but {reason or 'on another rank it differs from the reference'}")
        return INDUCTOR, form
    decision = api.decide(ffn, inputs, layout, settings)
    if decision.recipe is None:
        raise ValueError(f"{overlapped}, but {decision.reason}")
    return decision.recipe, decision.bias


def measure(
    ffn: Any, inputs: torch.Tensor, problem: known_plans.Problem, plans: tuple[Plan, ...], rounds: int
) -> dict[Plan, list[float]]:  # fmt: skip
    """The slowest rank's seconds of each plan in each of the rounds; without plans that do not compile or run.

    Raises RuntimeError where the first, unchunked plan does not.
    """
    group, P, device = ffn.ep_group, problem.layout.P, inputs.device
    ready: dict[Plan, Callable[[], Any]] = {}
    with _progress(len(plans) + rounds, ffn.ep_index == 0) as step:
        for each in plans:
            call, failure = _prepared(ffn, inputs, problem, each)
            if failure is None:
                ready[each] = call
            elif each == plans[0]:
                raise RuntimeError(f"the unchunked plan {each} cannot be timed: {failure}")
            elif ffn.ep_index == 0:
                notice.warn_once(f"the plan {each} is not timed: {failure}")
            step()
        stopwatch, failure = groups.attempt(group, P, device, lambda: Stopwatch(group, P, device))
        if failure is not None:
            text = f"nothing can be timed: {failure}"
            raise faults.RankFault(text, OF_CALL) if failure == groups.ELSEWHERE else RuntimeError(text)
        samples = {each: [] for each in ready}
        for index in range(rounds):
            first = index % len(ready)
            for each in (*list(ready)[first:], *list(ready)[:first]):
                samples[each].append(stopwatch.seconds(ready[each]))
            step()
    return dict(zip(samples, slowest(group, P, device, list(samples.values()))))


def _prepared(ffn, inputs, problem, chosen: Plan) -> tuple[Callable[[], Any] | None, str | None]:
    """(the call that is timed, None) after it has run a few times, or (None, why a rank cannot run it)."""
    candidate = problem.recipe, problem.bias
    layer, tensors, failure = api._layer(
        ffn, inputs.contiguous(), problem.layout, problem.settings, candidate, comp_only=False, chosen=chosen
    )
    if failure is not None:
        return None, failure
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    upstream = torch.ones_like(tensors[0])

    def call():
        output = layer(*tensors)
        return torch.autograd.grad(output, leaves, upstream) if output.requires_grad else output

    def warm_up():
        for _ in range(WARMUP):
            call()

    _, failure = groups.attempt(ffn.ep_group, problem.layout.P, inputs.device, warm_up)
    return (call, None) if failure is None else (None, failure)


def fastest(measured: dict[Plan, list[float]]) -> Plan:
    """The plan with the smallest median; the first, unchunked one unless that is slower by more than noise.

    Plans are compared within each round: the median difference must exceed 1 % of the unchunked plan's median, and
    three standard errors of a median (1.25 standard deviations over the root of the rounds, the deviation taken as 1.48
    times the median absolute one).
    """
    unchunked, *_ = measured
    best = min(measured, key=lambda each: statistics.median(measured[each]))
    gains = [whole - ours for whole, ours in zip(measured[unchunked], measured[best])]
    gain = statistics.median(gains)
    deviation = 1.4826 * statistics.median(abs(each - gain) for each in gains)
    noise = STANDARD_ERRORS * 1.2533 * deviation / len(gains) ** 0.5
    enough = max(MARGIN * statistics.median(measured[unchunked]), noise)
    return best if gain > enough else unchunked


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], Any]]:
    """A bar of `total` steps on the first rank; a plain line where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        if shown:
            print(f"tuning: {total} steps, one for each plan and round", file=sys.stderr, flush=True)
        yield lambda: None
        return
    with tqdm(total=total, desc="tuning", unit="step", disable=not shown) as bar:
        yield bar.update
