"""Compiles the layer for one configuration: our backend over `compile_fx`, one code object each.

A configuration is compiled before it is run, so that the ranks can agree that all of them can: its first call is made
with execution held back. Dynamo keeps at most eight variants of a code object and then silently runs eager code, so
each configuration has a code object of its own. At most `MAX_LAYERS` of them are kept for each group: then its oldest is
dropped for a new one. Not the least used, nor another group's: which layer of a group was made when is the same on all its
ranks, which was used when is not.
A dropped layer is freed at once, and its code with it: Dynamo, which keeps backends for good and compiled functions as
long as the code that they belong to, may not refer to it, and is told to forget its code.

From the second call on the compiled code is called directly. What Dynamo's guards would check, at 40 to 70 us a call, is
fixed by the configuration, but for the global state, which we check.
"""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from typing import Any, Callable, NamedTuple

import torch
from torch._inductor.compile_fx import compile_fx

import passes

from . import compat, notice, peer_layer
from .layer import overlapped_ffn
from .recipes import EAGER_EXACT

MAX_LAYERS = 256


class NotCompiledNow(RuntimeError):
    """Nothing was compiled, for a reason that may be gone at the next call."""


class _Prepared(Exception):
    """Compilation is done; the call was made only for that."""


class _Running(threading.local):
    """The layer that this thread is calling through Dynamo, and its tensors."""

    layer: CompiledLayer | None = None
    tensors: tuple[torch.Tensor, ...] = ()


_RUNNING = _Running()


class CompiledLayer:
    """`overlapped_ffn` with its static arguments bound, compiled at its first call."""

    def __init__(self, name: str, static: dict[str, Any]):
        def layer(inputs, *parameters):
            return overlapped_ffn(inputs, *parameters, **static)

        self.static = static
        self.preparing = False
        self.direct: _Direct | None = None
        function = _fresh(layer, name)
        self._run = torch.compile(function, backend=_compile, dynamic=False, fullgraph=True)
        weakref.finalize(self, compat.forget_compiled, function.__code__).atexit = False

    def prepare(self, *tensors: torch.Tensor) -> Exception | None:
        """Compile the forward for these tensors without running it; the error if that fails."""
        self.preparing = True
        try:
            self._call(tensors)
        except _Prepared:
            return None
        except Exception as error:  # whatever the compiler raises is the reason for delegating
            return NotCompiledNow(str(error)) if compat.is_intercepted() or compat.compiles_no_more() else error
        finally:
            self.preparing = False
        return NotCompiledNow("torch.compile is disabled, or a mode that is active keeps it from compiling")

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        direct = self.direct
        if direct is not None and direct.state.check() and not compat.concerns_dynamo():
            return direct.run(*tensors)
        return self._call(tensors)

    def _call(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        _RUNNING.layer, _RUNNING.tensors = self, tensors
        try:
            return self._run(*tensors)
        finally:
            _RUNNING.layer, _RUNNING.tensors = None, ()


def _compile(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The backend: compile the graph of the layer that is being called."""
    of_layer, patches, decompositions = weakref.ref(_RUNNING.layer), passes.config_patches(), None
    patches["size_asserts"] = False  # what a compiled layer is called with has been checked
    if _RUNNING.layer.static["recipe"] == EAGER_EXACT:
        patches["shape_padding"] = False
        decompositions = compat.exact_decompositions()
    compiled = compile_fx(graph, example_inputs, config_patches=patches, decompositions=decompositions)

    def run(*args):
        layer = of_layer()
        if layer.preparing:
            raise _Prepared
        if layer.direct is not None:
            return compiled(*args)
        with peer_layer.heard() as calls:
            results = compiled(*args)
        layer.direct = _Direct.of(compiled, args, results, _RUNNING.tensors, calls)
        return results

    return run


class _Direct(NamedTuple):
    """The layer without Dynamo, and the global state it was compiled under."""

    run: Callable[..., torch.Tensor]
    state: Any

    @classmethod
    def of(cls, compiled: Callable[..., Any], args: tuple, results: Any, tensors: tuple, calls: list) -> _Direct | None:
        """For code that took `args` and gave `results` in a call of the layer; None if it takes anything else.

        `calls`: those of the operator that is a whole layer. Code that is nothing else is left out.
        """
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        order = tuple(places.get(id(arg), -1) for arg in args)
        if len(results) != 1 or sorted(order) != list(range(len(tensors))) or compat.is_intercepted():
            return None
        alone = peer_layer.alone(calls, tensors, results)
        return cls(alone or (lambda *given: compiled(*[given[index] for index in order])[0]), compat.global_state())


def _fresh(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


_LAYERS: dict[tuple[Any, ...], CompiledLayer | str] = {}
_NUMBERS = itertools.count()


def cached_layer(key: tuple[Any, ...]) -> CompiledLayer | str | None:
    """The compiled layer of this configuration, the reason why it could not be compiled, or None if it is new."""
    return _LAYERS.get(key)


def drop_oldest(group: str | None) -> CompiledLayer | str | None:
    """Make place for a new layer of a group that has `MAX_LAYERS`: what was dropped, for others to forget, or None.

    `group`: its name, with which the keys of its layers begin; None for layers of one rank.
    """
    of_group = [key for key in list(_LAYERS) if key[0] == group]
    if len(of_group) < MAX_LAYERS:
        return None
    notice.warn_once(
        f"more than {MAX_LAYERS} configurations (shapes, strides, dtypes, grad modes): the oldest is dropped for each "
        "new one, and compiled again when it comes back; pad or bucket the batch sizes"
    )
    return _LAYERS.pop(of_group[0])


def new_layer(key: tuple[Any, ...], static: dict[str, Any]) -> CompiledLayer:
    """Create and keep the layer of a configuration."""
    passes.install()
    layer = _LAYERS[key] = CompiledLayer(f"overlapped_ffn_{next(_NUMBERS)}", static)
    return layer


def failed(key: tuple[Any, ...], reason: str, lasting: bool) -> str:
    """Keep that a configuration cannot be compiled, so that it is not tried at every call; returns the reason.

    A reason that is not `lasting` is forgotten, and the next call tries again.
    """
    if lasting:
        _LAYERS[key] = reason
    else:
        del _LAYERS[key]
    return reason


def reset() -> None:
    """Drop every compiled configuration."""
    _LAYERS.clear()
