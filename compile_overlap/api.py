"""`forward_ffn`: the plugin's entry. Eager callers get the compiled layer; an outer `torch.compile` inlines the layer."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from dataclasses import dataclass
from operator import index
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch._dynamo.comptime import comptime

import passes
from passes import graphs

from . import calls, compat, compiler, faults, known_plans, notice, plan, probe, transport
from .config import VARIABLES, Settings, variables
from .group import all_ranks, group_name, overlap_alias
from .layer import overlapped_ffn
from .layout import PARAMETERS, Layout, check_call, eps_of, parameters_of
from .recipes import ADD, EAGER_EXACT, INDUCTOR
from .schedule import Plan


@dataclass(frozen=True)
class Decision:
    """What answers a configuration: a recipe and bias form, or the reference for `reason`."""

    recipe: str | None
    bias: str | None
    reason: str


def forward_ffn(ffn: Any, inputs: torch.Tensor, *, comp_only: bool = False) -> torch.Tensor:
    """The overlapped expert-parallel FFN: inputs [B,T,D] -> [B,T,D], differentiable to the input and all parameters.

    `ffn` has `w1 [L,D,2H], b1 [L,2H], wout [L,H,D], bout [L,D], norm_x, norm_gate, ep_group, ep_index, ep_group_size,
    fwd_mode, bwd_mode, gemm_backend`, and `forward(inputs, overlap="none", comp_only=...)`, the reference that decides
    the recipe and answers where the layer cannot. With `comp_only` the exchanges are replaced by the local layout
    change. All ranks of the group must call it alike.

    Raises:
        ValueError: for bad input, and on every rank where ranks are about to do different things; before any exchange.
        RankFault: an exchange failed, or other ranks did not come; which ranks, and why (see `faults`).
    """
    # Not `is_compiling`, which is true in all threads while one of them compiles.
    if torch.compiler.is_dynamo_compiling():
        return _inlined(ffn, inputs, check_call(ffn, inputs), plan.unsupported(ffn, inputs), comp_only)
    before = True
    try:
        layer, tensors = _answer(ffn, inputs, comp_only)
        before = False
        if ffn.ep_group_size > 1 and not comp_only:
            faults.begin(ffn.ep_group)
        return layer(*tensors)
    except Exception as error:
        fault = _explained("forward_ffn", ffn, inputs, error, before)
        if fault is error:
            raise
        raise fault from error


def _answer(
    ffn: Any, inputs: torch.Tensor, comp_only: bool
) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """What answers `forward_ffn` of an eager caller, and the tensors that it takes."""
    around = compat.transform_in_use() or compat.selection_in_use()
    known = None if around else calls.known_layer(ffn, inputs, comp_only)
    if known is not None:
        layer, parameters = known
        return layer, (inputs.contiguous(), *parameters)
    _enter(ffn)
    layout = check_call(ffn, inputs)
    settings = Settings.from_environment()
    layer, reason = None, around or plan.unsupported(ffn, inputs) or plan.decomposed(layout, inputs)
    with _deciding(ffn.ep_group, layout.P):
        agree_on_call(ffn.ep_group, layout, inputs.dtype, reason)
        if reason is None:
            layer, reason = _decided(ffn, inputs, layout, settings, comp_only)
    if layer is None:
        notice.delegate(reason, strict=settings.strict, rank=ffn.ep_index)
        return functools.partial(_reference, ffn, inputs, comp_only, reason), ()
    with _KEEPING:
        calls.keep(ffn, inputs, comp_only, layer)
    return layer, (inputs.contiguous(), *parameters_of(ffn))


@contextlib.contextmanager
def telling(name: str, ffn: Any, inputs: Any) -> Iterator[None]:
    """Around `name(ffn, inputs)`, which all ranks of the group call: an error of one is told to the others at once."""
    try:
        _enter(ffn)
        yield
    except Exception as error:
        fault = _explained(name, ffn, inputs, error, before=True)
        if fault is error:
            raise
        raise fault from error


def _enter(ffn: Any) -> None:
    if _has_others(ffn):
        faults.enter(getattr(ffn, "ep_group", None))


def _has_others(ffn: Any) -> bool:
    size = getattr(ffn, "ep_group_size", 1)
    return isinstance(size, int) and size > 1


def _explained(name: str, ffn: Any, inputs: Any, error: Exception, before: bool) -> Exception:
    """What a failed call raises: `error`, or one that names the ranks at fault."""
    if not _has_others(ffn):
        return error
    return faults.explained(getattr(ffn, "ep_group", None), error, f"{name}({_described(ffn, inputs)})", before)


def _described(ffn: Any, inputs: Any) -> str:
    """A call's inputs, and what is unusual in its tensors: ranks must not differ in these either."""
    if not isinstance(inputs, torch.Tensor):
        return f"inputs {type(inputs).__name__}"
    parts = [f"inputs {tuple(inputs.shape)}, {inputs.dtype}"]
    with contextlib.suppress(AttributeError):  # no layer
        tensors = dict(zip(PARAMETERS, parameters_of(ffn)))
        frozen = [key for key, each in tensors.items() if each is not None and not each.requires_grad]
        odd = [f"{key} {each.stride()}" for key, each in tensors.items() if each is not None and not each.is_contiguous()]
        parts += ["inputs require gradients"] if inputs.requires_grad else []
        parts += [f"frozen: {', '.join(frozen)}"] if frozen else []
        parts += [f"strides: {', '.join(odd)}"] if odd else []
    return "; ".join([*parts, *([] if torch.is_grad_enabled() else ["no gradients"])])


def _reference(ffn: Any, inputs: torch.Tensor, comp_only: bool, reason: str) -> torch.Tensor:
    """The reference's answer. Raises RuntimeError where training would silently leave the parameters without gradients."""
    outputs = ffn.forward(inputs, overlap="none", comp_only=comp_only)
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters_of(ffn))
    if trained and not outputs.requires_grad and compat.transform_in_use() is None:
        raise RuntimeError(
            f"the reference answers this call, because {reason}; but its output is cut off from autograd, so that no "
            "parameter would get a gradient: make its exchanges differentiable, or call it under torch.no_grad()"
        )
    return outputs


# Ranks wait for each other while one is held: so one for each group, or threads of several groups could take them in
# different orders on different ranks. `_KEEPING` is over what is kept for all groups, and never held during a wait.
_DECIDING: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_ALONE, _KEEPING = threading.RLock(), threading.RLock()


def _deciding(group: Any, P: int) -> threading.RLock:
    """The lock under which a group's layers are decided and made."""
    return _ALONE if P == 1 else _DECIDING.setdefault(dist.group.WORLD if group is None else group, threading.RLock())


def _decided(
    ffn: Any, inputs: torch.Tensor, layout: Layout, settings: Settings, comp_only: bool
) -> tuple[compiler.CompiledLayer | None, str | None]:
    """(the compiled layer that answers this call, None), or (None, why the reference does)."""
    inputs = inputs.contiguous()
    decision = decide(ffn, inputs, layout, settings)
    if decision.recipe is None:
        return None, decision.reason
    layer, _, reason = _layer(ffn, inputs, layout, settings, (decision.recipe, decision.bias), comp_only)
    return layer, reason


_RAN: weakref.WeakKeyDictionary[Any, dict[known_plans.Problem, Plan]] = weakref.WeakKeyDictionary()


def plan_that_ran(group: Any, problem: known_plans.Problem) -> Plan | None:
    """The plan in the exchanges of the layer that answers this problem on this group; None where none has been made."""
    return _RAN.get(dist.group.WORLD if group is None else group, {}).get(problem)


def _remember(group: Any, problem: known_plans.Problem, alias: str | None) -> None:
    """Keep the plan that a layer's exchanges carry, read off the name that they use; a layer without any keeps none."""
    if alias is not None:
        _RAN.setdefault(dist.group.WORLD if group is None else group, {})[problem] = graphs.plan_of(alias)


_DECISIONS: weakref.WeakKeyDictionary[Any, dict[Any, Decision]] = weakref.WeakKeyDictionary()


def decide(ffn: Any, inputs: torch.Tensor, layout: Layout, settings: Settings) -> Decision:
    """The decision for this layer and configuration; taken at its first call, the same for every batch size."""
    known = _DECISIONS.setdefault(ffn, {})
    norms = type(ffn.norm_x), type(ffn.norm_gate)
    key = (layout.P, layout.T, layout.D, layout.H, inputs.dtype, inputs.device, torch.is_grad_enabled(), norms, settings)
    if key not in known:
        _refuse_capture(inputs, "the recipe is decided")
        agree_on_call(ffn.ep_group, layout, inputs.dtype, None)

        def run(part, candidate):
            part_layout = Layout(layout.P, part.shape[0], layout.T, layout.D, layout.H)
            if candidate[0] == EAGER_EXACT:
                return overlapped_ffn(
                    part, *parameters_of(ffn), **_static(ffn, part_layout, settings, candidate, comp_only=False)
                )
            layer, tensors, failure = _layer(ffn, part, part_layout, settings, candidate, comp_only=False)
            return None if failure else layer(*tensors)

        found = probe.matching_candidate(ffn, inputs, layout, settings, run)
        if found is None:
            known[key] = Decision(None, None, "no recipe equals the reference bit for bit")
        else:
            known[key] = Decision(*found, "equals the reference" if probe.undecided(settings) else "as set")
    return known[key]


def plan_for(ffn: Any, layout: Layout, settings: Settings, candidate: probe.Candidate = (INDUCTOR, ADD)) -> Plan:
    """The plan of this layer with this recipe and bias form (see `transport.plan_for`)."""
    problem = problem_of(ffn, layout, settings, candidate)
    return transport.plan_for(ffn.ep_group, ffn.ep_index, ffn.w1.device, problem)


def problem_of(ffn: Any, layout: Layout, settings: Settings, candidate: probe.Candidate) -> known_plans.Problem:
    """What a plan of this layer is made for, in the current grad mode."""
    scale = getattr(ffn, "comm_scale", 1)
    return known_plans.Problem(layout, ffn.w1.dtype, torch.is_grad_enabled(), *candidate, scale, settings)


def _static(
    ffn: Any, layout: Layout, settings: Settings, candidate: probe.Candidate, comp_only: bool, chosen: Plan | None = None
) -> dict[str, Any]:
    chosen = chosen or plan_for(ffn, layout, settings, candidate)
    exchanged = layout.P > 1 and not comp_only
    return {
        "sizes": chosen.sizes,
        "P": layout.P,
        "group": overlap_alias(ffn.ep_group, chosen) if exchanged else None,
        "recipe": candidate[0],
        "bias": candidate[1],
        "eps": eps_of(ffn),
        "triton": chosen.triton,
        "rounds_as_eager": compat.rounds_as_eager(),
        "exact_gradients": plan.exact_gradients(ffn.w1.device.type, settings),
        "comm_scale": getattr(ffn, "comm_scale", 1),
    }


def _layer(
    ffn: Any, inputs: torch.Tensor, layout: Layout, settings: Settings, candidate: probe.Candidate, comp_only: bool,
    chosen: Plan | None = None,
) -> tuple[compiler.CompiledLayer | None, tuple[torch.Tensor, ...], str | None]:  # fmt: skip
    """(compiled layer, its tensors, None), or a reason why the group cannot compile it; with the plan `chosen`, or its own."""
    static = _static(ffn, layout, settings, candidate, comp_only, chosen)
    tensors = (inputs, *parameters_of(ffn))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # The group belongs to the key even where nothing is exchanged: whether a rank compiles is agreed over it.
    group = group_name(ffn.ep_group) if layout.P > 1 else None
    per_tensor = tuple((t.requires_grad, _strides(t)) for t in tensors)
    key = (group, layout, tuple(static.items()), inputs.dtype, modes, per_tensor, inputs.device)
    layer = compiler.cached_layer(key)
    if layer is None:
        _refuse_capture(inputs, "the layer is compiled")
        agreed = {**static, "modes": modes, "requires_grad and strides": per_tensor}
        faults.agree(ffn.ep_group, layout.P, f"the layer for {layout}", agreed)
        with _KEEPING:
            calls.forget(compiler.drop_oldest(group))
            layer = compiler.new_layer(key, static)
        error = layer.prepare(*tensors)
        if not all_ranks(ffn.ep_group, layout.P, inputs.device, error is None):
            failure = f"compilation failed: {error or 'on another rank'}"
            lasting = not isinstance(error, compiler.NotCompiledNow)
            lasting = all_ranks(ffn.ep_group, layout.P, inputs.device, lasting)
            layer = compiler.failed(key, failure, lasting)
    if isinstance(layer, str):
        return None, tensors, layer
    if chosen is None:
        _remember(ffn.ep_group, problem_of(ffn, layout, settings, candidate), static["group"])
    return layer, tensors, None


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Without those of axes of one element, which may be anything and differ between ranks."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1)


def agree_on_call(
    group: Any, layout: Layout, dtype: torch.dtype, reason: str | None, answer: str = "the layer"
) -> None:
    """Make sure, once for each kind of call, that all ranks of the group make it: shapes, settings, versions.

    `answer` says what answers it, unless the reference does for a `reason`. Raises what `faults.agree` raises.
    """
    configuration = {
        "inputs.shape": (layout.B, layout.T, layout.D),
        "H": layout.H,
        "dtype": dtype,
        "gradients": "on" if torch.is_grad_enabled() else "off",
        "emulate_precision_casts": compat.rounds_as_eager(),
        "answered by": answer if reason is None else f"the reference, because {reason}",
        **{name: "not set" if text is None else os.fsdecode(text) for name, text in zip(VARIABLES, variables())},
        **faults.versions(),
    }
    what = f"forward_ffn(inputs {configuration['inputs.shape']}, {dtype})"
    faults.agree_once(group, layout.P, what, configuration)


def _refuse_capture(inputs: torch.Tensor, what: str) -> None:
    if inputs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} at the first call of a configuration: call it once before the CUDA graph capture")


def reset() -> None:
    """Forget every decision and compiled configuration; the next calls decide and compile again, on every rank."""
    _DECISIONS.clear()
    _RAN.clear()
    faults.reset()
    calls.reset()
    compiler.reset()
    transport.reset()


# Inside an outer torch.compile. Dynamo traces these lines; what must not be traced runs at trace time.

_OBSERVED: dict[type, tuple[str, str | None]] = {}


def _inlined(ffn: Any, inputs: torch.Tensor, layout: Layout, reason: str | None, comp_only: bool) -> torch.Tensor:
    # `index`: the plan is made for one layout, so what is symbolic in it becomes a constant here.
    P, B, T, D, H = map(index, (layout.P, layout.B, layout.T, layout.D, layout.H))
    rank, comm_scale = index(ffn.ep_index), index(getattr(ffn, "comm_scale", 1))
    if reason is None:
        comptime(_observe_reference)
    group = "" if ffn.ep_group is None else ffn.ep_group.group_name
    delegated, sizes, triton, rounds_as_eager, alias, bias = _at_trace_time(
        type(ffn), P, B, T, D, H, ffn.w1.dtype, ffn.w1.device,
        group, P > 1 and not comp_only, torch.is_grad_enabled(), reason, rank, comm_scale,
    )  # fmt: skip
    if delegated:
        return ffn.forward(inputs, overlap="none", comp_only=comp_only)
    return overlapped_ffn(
        inputs,
        *parameters_of(ffn),
        sizes=sizes,
        P=P,
        group=alias,
        recipe=INDUCTOR,
        bias=bias,
        eps=eps_of(ffn),
        exact_gradients=False,
        triton=triton,
        rounds_as_eager=rounds_as_eager,
        comm_scale=comm_scale,
    )


def _observe_reference(context: Any) -> None:
    ffn = compat.comptime_value(context, "ffn")
    form = probe.observed_bias_form(ffn)
    _OBSERVED[type(ffn)] = form, probe.difference_from_reference(ffn, form)


@torch._dynamo.assume_constant_result
def _at_trace_time(
    kind: type,
    P: int,
    B: int,
    T: int,
    D: int,
    H: int,
    dtype: torch.dtype,
    device: torch.device,
    group: str,
    exchanged: bool,
    training: bool,
    reason: str | None,
    rank: int,
    comm_scale: int,
) -> tuple[bool, tuple[int, ...], tuple[str, ...], bool, str | None, str]:
    """(delegated, sizes, triton, rounds_as_eager, group alias, bias form); installs the passes, registers the alias.

    `group` is a registered name, or empty for the default group.
    """
    settings, form = Settings.from_environment(), ""
    if reason is None:
        form, reason = _OBSERVED[kind]
    bias = settings.bias or form
    if settings.recipe == EAGER_EXACT and reason is None:
        reason = "A2A_FFN_RECIPE=eager_exact inside an outer torch.compile, which rounds as Inductor does"
    layout = Layout(P, B, T, D, H)
    resolved = torch._C._distributed_c10d._resolve_process_group(group) if group else None
    answer = f"the layer inside an outer torch.compile, bias form {bias}, comm_scale {comm_scale}"
    agree_on_call(resolved, layout, dtype, reason, answer)
    if reason is not None:
        notice.delegate(reason, strict=settings.strict, rank=rank)
        return True, (), (), False, None, ""
    passes.install()
    problem = known_plans.Problem(layout, dtype, training, INDUCTOR, bias, comm_scale, settings)
    chosen = transport.plan_for(resolved, rank, device, problem)
    alias = overlap_alias(resolved, chosen) if exchanged else None
    _remember(resolved, problem, alias)
    return False, chosen.sizes, chosen.triton, compat.rounds_as_eager(), alias, bias
