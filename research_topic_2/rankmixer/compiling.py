"""Static compilation where every variant has a code object of its own.

torch.compile stops compiling a code object after a handful of variants and then silently runs it eagerly, also
across separate ``torch.compile`` objects of the same function. A benchmark must never time that by accident.
"""

import itertools
import types

import torch
import torch._dynamo

_VARIANTS = itertools.count()
_VARIANT_LIMIT = 512


def compile_fresh(function):
    """``torch.compile(dynamic=False)`` of a copy of a plain Python ``function`` with a fresh code object."""
    _raise_variant_limits()
    name = f"{function.__name__}_variant_{next(_VARIANTS)}"
    copy = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name,
                              function.__defaults__, function.__closure__)
    return torch.compile(copy, dynamic=False)


def _raise_variant_limits():
    """Lift the limits for functions that Dynamo compiles apart after a graph break (the block, the FFN)."""
    config = torch._dynamo.config
    for name in ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), _VARIANT_LIMIT))
