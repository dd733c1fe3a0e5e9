"""Launches of Triton kernels, past the binder where a kernel has been launched with such arguments before.

The binder classifies every argument anew at every call, 20 to 40 us in which a layer of small chunks has nothing else to
do. Here a call is known by its argument values and, for tensors, dtype and alignment: all that a compiled kernel depends
on. The first one goes through Triton's JIT, which returns what it compiled; later ones launch that.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import compat

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream, with these warps and pipeline stages.

    `args` are the parameters that are no constants, in the kernel's order: tensors, tensor-memory descriptors, numbers. The
    first is a tensor or descriptor. `constants` come in the same order at every call of a kernel.
    """
    kinds = [
        arg if type(arg) is int else (arg.dtype, arg.data_ptr() & 15) if type(arg) in _TENSORS else _kind(arg) for arg in args
    ]
    device = getattr(args[0], "base", args[0]).device.index
    key = (id(kernel), device, num_warps, num_stages, *constants.values(), *kinds)
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
        if compiled is not None:  # None from Triton's interpreter
            _COMPILED[key] = compiled
        return
    if compat.TRITON_LAUNCHES_WITH_CONSTANTS:
        args += tuple(constants[name] for name in kernel.arg_names[len(args) :])
    compiled[(*grid, 1, 1)[:3]](*args)


def _kind(arg: Any) -> Any:
    """What a compiled kernel depends on of a float, of a tensor of a subclass, or of a descriptor."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() & 15
    return float if type(arg) is float else (arg.base.dtype, *arg.block_shape)
