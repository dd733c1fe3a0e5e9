"""Every difference between the torch versions this project runs on (2.6.0 and newer) lives here.

| what                                             | 2.6.0            | newer                      |
| ------------------------------------------------ | ---------------- | -------------------------- |
| `all_to_all_single` constrains its input strides | no: we add it    | yes                        |
| scheduler-pass base class                        | CustomGraphPass  | CustomSchedulerPass (2.13) |
| `WeakDep` that does not extend lifetimes         | no               | `is_fake=True`             |
| `GraphLowering.save_output_code` when unused     | a no-op          | None (2.13)                |
| arguments of operators without a layout tag      | made contiguous  | as traced                  |
| the store of symmetric memory                    | a file           | the group's                |
| the norm of a sum that is not saved              | does not round it | as of a saved one         |
| a compiled Triton kernel is launched with         | no constants     | all parameters             |
| Inductor's silu                                  | x sigmoid(x)     | x / (1 + exp(-x))          |

What reads internals that no version makes public is here too: `comptime_value`, `global_state`, `tensor_guards`,
`is_registered`, `store_of`, `timeout_s`, `environment`, `is_intercepted`, `concerns_dynamo`, `transform_in_use`,
`selection_in_use`, `reinterpreted`, `forget_compiled`, `compiles_no_more`, `launcher_of`.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from typing import Any, Callable

import torch
from torch._functorch.aot_autograd import get_aot_graph_name
from torch._inductor import custom_graph_pass
from torch._inductor.dependencies import WeakDep
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

CustomGraphPass = custom_graph_pass.CustomGraphPass
CustomSchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)

# In 2.6.0 Inductor rounds a sum to its dtype before a layer norm only where backward needs the sum, as the reference's
# does. A layer whose backward needs the two operands instead would differ from the reference in its forward.
ROUNDS_SAVED_SUMS_ONLY = torch.__version__.startswith("2.6.")

SILU_IS_A_QUOTIENT = not torch.__version__.startswith("2.6.")

# Where this is the default, compiled code hands an operator its arguments with the strides that were traced; 2.6.0 has to
# be told, or it copies what is not contiguous.
LAYOUT_TAGS = () if hasattr(torch.Tag, "needs_exact_strides") else (torch.Tag.needs_fixed_stride_order,)
# Metadata of an FX node that says what its operator's arguments were: of no use to an operator that takes its place.
OF_ARGUMENTS = "eager_input_vals"

SYMMETRIC_MEMORY_HAS_OWN_STORE = torch.__version__.startswith("2.6.")

try:
    import triton

    TRITON_VERSION = triton.__version__
    # What a compiled kernel is launched with: all parameters, or those that are no constants (Triton 3.2, of torch 2.6.0).
    TRITON_LAUNCHES_WITH_CONSTANTS = not triton.__version__.startswith("3.2.")
except ImportError:
    TRITON_VERSION, TRITON_LAUNCHES_WITH_CONSTANTS = None, False

_WEAK_DEP_HAS_FAKE = "is_fake" in inspect.signature(WeakDep).parameters


def order_dep(name: str, mutating_buf: str) -> WeakDep:
    """A dependency that only orders two scheduler nodes; where the version can say so, it keeps no buffer alive."""
    if _WEAK_DEP_HAS_FAKE:
        return WeakDep(name, mutating_buf=mutating_buf, is_fake=True)
    return WeakDep(name, mutating_buf=mutating_buf)


def constrain_all_to_all_strides() -> None:
    """Give `_c10d_functional.all_to_all_single` the stride constraint that newer versions have.

    Without it Inductor may hand the collective a buffer in another memory order than the graph's, which fails with
    "Tensors must be contiguous" (pytorch issue 137259). Where the constraint exists already, nothing changes.
    """
    from torch._inductor import lowering

    op = torch.ops._c10d_functional.all_to_all_single
    known = lowering.__dict__.get("_maybe_layout_constraints", {})
    if known.get(op.default) is None:
        lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)


def exact_decompositions() -> dict[Any, Any]:
    """Inductor's decompositions without those that replace a GEMM by other arithmetic (a bmm of one row, on CPU)."""
    from torch._inductor.decomposition import select_decomp_table

    gemms = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
    return {op: rule for op, rule in select_decomp_table().items() if op not in gemms}


def comptime_value(context: Any, name: str) -> Any:
    """The Python object behind local variable `name` of the frame that Dynamo is tracing."""
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return variable.realize().value


def global_state() -> Any:
    """The modes of this moment as Dynamo guards them (gradients, autocast, determinism, precision); `check()` compares."""
    return torch._C._dynamo.guards.GlobalStateGuard()


def tensor_guards(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """A check whether tensors are like these, as Dynamo guards them: class, dispatch keys, dtype, device, shape, strides,
    `requires_grad`; 2 us for nine of them."""
    guards = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def is_registered(group: torch.distributed.ProcessGroup) -> bool:
    """Whether a group is one of this process's, and has not been destroyed."""
    return group in torch.distributed.distributed_c10d._world.pg_map


def environment(names: tuple[str, ...]) -> tuple[str | None, ...]:
    """These environment variables' texts, as `os.environ` holds them; past its lookup, which takes 1 us for one unset."""
    return tuple(map(os.environ._data.get, _encoded(names)))


@functools.lru_cache(maxsize=None)
def _encoded(names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(map(os.environ.encodekey, names))


def launcher_of(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """`compiled[grid]` of a compiled Triton kernel, `launch(*args, stream=...)`; where this version's way is known, without
    the hooks of Triton's profiler, which cost the host time at each launch."""
    launch = compiled[grid]  # loads it
    if TRITON_VERSION is None or TRITON_VERSION.rpartition(".")[0] not in ("3.2", "3.3", "3.4", "3.5", "3.6"):
        return launch
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    between: tuple[Any, ...] = ()
    if TRITON_VERSION.startswith("3.6.") and not (run.global_scratch_size or run.profile_scratch_size):
        between = run.launch_cooperative_grid, run.launch_pdl, None, None  # no memory is to be made for the kernel
        run = run.launch

    def without_hooks(*args: Any, stream: int) -> None:
        run(*grid, stream, function, *between, metadata, None, None, None, *args)

    return without_hooks


def current_raw_stream() -> int:
    """The handle of the current CUDA stream of the current device, as a driver's launch takes it."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


# (tensor, size, stride, offset): its memory as another tensor, no view of it, as compiled code returns it.
reinterpreted = torch._C._dynamo.guards._reinterpret_tensor


def is_intercepted() -> bool:
    """Whether modes see the operators that are called now."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def concerns_dynamo() -> bool:
    """Whether one of these modes is for Dynamo to decide about: one that sees functions, or PyTorch's own (fake tensors, say).

    Beside any other dispatch mode (a counter of operations, say) newer versions compile nothing, and run nothing compiled.
    """
    if torch._C._len_torch_function_stack():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and any(mode.is_infra_mode() for mode in _dispatch_modes())


def transform_in_use() -> str | None:
    """The transform of functions under which operators are called now: one that compiled code cannot follow; or None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is in use"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is in use"
    return None


def selection_in_use() -> str | None:
    """What selects the operators whose results a checkpoint keeps: it means those of the reference; or None."""
    selecting = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    if torch._C._len_torch_dispatch_stack() and any(isinstance(mode, selecting) for mode in _dispatch_modes()):
        return "selective activation checkpointing is in use"
    return None


def forget_compiled(code: types.CodeType) -> None:
    """Free what Dynamo compiled for a code object; it would keep both, which refer to each other."""
    from torch._dynamo import eval_frame

    eval_frame.remove_from_cache(code)


def compiles_no_more() -> bool:
    """Whether a stance (`torch.compiler.set_stance`) keeps Dynamo from compiling."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance != "default"


def rounds_as_eager() -> bool:
    """Whether Inductor is set to round what it fuses as eager does, between operators (`emulate_precision_casts`)."""
    from torch._inductor import config

    return config.emulate_precision_casts


def compiled_by_inductor(function: Callable[..., Any], operands: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """`function` as Inductor compiles it for tensors like these, without gradients; also while Dynamo traces."""
    from torch._guards import tracing
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(None), torch.no_grad():
        compiled = compile_fx(make_fx(function)(*operands), list(operands))

    def call(*tensors):
        with tracing(None), torch.no_grad():
            return compiled(*tensors)

    return call


def register_group_alias(alias: str, group: torch.distributed.ProcessGroup) -> None:
    """Make `alias` resolve to `group` in functional collectives; an alias of a destroyed group is replaced."""
    c10d = torch._C._distributed_c10d
    try:
        known = c10d._resolve_process_group(alias)
    except Exception:  # the registry raises RuntimeError or ValueError, by version
        known = None
    if known is group:
        return
    if known is not None:
        c10d._unregister_process_group(alias)
    c10d._register_process_group(alias, group)


def store_of(group: torch.distributed.ProcessGroup) -> torch.distributed.Store:
    """The store through which the ranks of a group found each other; its keys are the group's own."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def timeout_s(group: torch.distributed.ProcessGroup) -> float:
    """The timeout of a group's collectives; the shortest one, where it has several backends."""
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    usual = torch.distributed.constants.default_pg_timeout
    return min(getattr(each, "_timeout", usual).total_seconds() for each in options)


def symmetric_memory_store(group: torch.distributed.ProcessGroup) -> torch.distributed.Store:
    """The store over which the ranks of a group make each other's memory known."""
    from torch.distributed import _symmetric_memory

    if SYMMETRIC_MEMORY_HAS_OWN_STORE:
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
        return _symmetric_memory._group_name_to_store[group.group_name]
    return store_of(group)


def is_backward_graph() -> bool:
    """Whether the graph that is being compiled is a backward one."""
    return "backward" in get_aot_graph_name()


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a node is a gradient that a backward graph begins with."""
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments that a node's operator writes to, by its schema; all of them for a mutating Triton kernel."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.all_input_nodes if "mutation" in getattr(node.target, "__name__", "") else []
    if not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), node.args)) | dict(node.kwargs)
    written = []
    for argument in schema.arguments:
        value = named.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in written if isinstance(value, torch.fx.Node)]


def simplified_split(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The tensors that a node hands on, where Inductor put it in place of their concatenation and its split."""
    if getattr(node.target, "__name__", "") != "cat_splitwithsizes_replace":
        return None
    return list(node.kwargs["input_"] if "input_" in node.kwargs else node.args[0])


def graph_meta(key: str) -> Any:
    """What a pass left under `key` in the metadata of the FX module that Inductor is lowering; None if nothing.

    Nothing is being lowered where the code comes from a cache.
    """
    from torch._inductor.virtualized import V

    module = getattr(V.graph, "module", None)
    return None if module is None else module.meta.get(key)


def writes_cpp_wrapper() -> bool:
    """Whether the graph that Inductor is lowering gets a C++ wrapper (the setting itself is hidden meanwhile)."""
    from torch._inductor.virtualized import V

    return bool(getattr(V.graph, "cpp_wrapper", False))


def watch_wrappers(watch: Callable[[str], None]) -> None:
    """Call `watch` with the source of every wrapper that Inductor generates in this process, after other watchers."""
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code

    def chained(code: str) -> None:
        if before is not None:
            before(code)
        watch(code)

    GraphLowering.save_output_code = staticmethod(chained)
