"""Static compilation where every variant has a code object of its own.

torch.compile stops compiling a code object after a handful of variants and then silently runs it eagerly, also
across separate ``torch.compile`` objects of the same function. A benchmark must never time that by accident.
"""

import functools
import itertools
import types

import torch
import torch._dynamo

_VARIANTS = itertools.count()
_VARIANT_LIMIT = 512


def compile_fresh(function, inductor_config=None):
    """``torch.compile(dynamic=False)`` of a copy of a plain Python ``function`` with a fresh code object.

    ``inductor_config`` are settings of ``torch._inductor.config`` for this function only. They hold for its forward and
    its backward, whenever and in whichever thread that is compiled, and are part of Inductor's cache keys.
    """
    _raise_variant_limits()
    name = f"{function.__name__}_variant_{next(_VARIANTS)}"
    copy = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name,
                              function.__defaults__, function.__closure__)
    if not inductor_config:
        return torch.compile(copy, dynamic=False)
    return torch.compile(copy, dynamic=False, backend=functools.partial(_compile_with, dict(inductor_config)))


def _compile_with(inductor_config, graph, example_inputs):
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, example_inputs, config_patches=inductor_config)


def _raise_variant_limits():
    """Lift the limits for functions that Dynamo compiles apart after a graph break (the block, the FFN)."""
    config = torch._dynamo.config
    for name in ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), _VARIANT_LIMIT))
