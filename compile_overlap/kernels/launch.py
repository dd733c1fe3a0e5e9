"""Launches of Triton kernels, past the binder where a kernel has been launched for such operands before.

The binder classifies every argument anew at every call, 20 to 40 us in which a layer of small chunks has nothing else to
do. Here whatever follows from shapes, strides, dtype and device is prepared once (`Launch`, kept by the caller for them);
what is left of a call are the tensors' addresses, of whose alignment compiled code depends. The first launch for an
alignment goes through Triton's JIT, which returns what it compiled; later ones launch that.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import compat


class Launch:
    """`kernel[grid](*tensors, *numbers, **constants)` with these warps and pipeline stages, for tensors to come.

    The kernel's parameters are tensors (or tensor-memory descriptors), then numbers, then constants, in this order.
    Tensors must have the same dtypes and device at every call; it runs on the current device and stream.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], *, num_warps: int, num_stages: int = 3, **constants
    ):
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self._rest = numbers
        if compat.TRITON_LAUNCHES_WITH_CONSTANTS:
            self._rest += tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        alignment = tuple([t.data_ptr() & 15 if isinstance(t, torch.Tensor) else 0 for t in tensors])
        run = self._compiled.get(alignment)
        if run is not None:
            run(*tensors, *self._rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        if compiled is not None:  # None from Triton's interpreter
            self._compiled[alignment] = compiled[(*self.grid, 1, 1)[:3]]
