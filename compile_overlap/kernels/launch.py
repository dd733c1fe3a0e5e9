"""Launches of Triton kernels, past the binder where a kernel has been launched for such operands before.

The binder classifies every argument anew at every call, 20 to 40 us in which a layer of small chunks has nothing else to
do. Here whatever follows from shapes, strides, dtype and device is prepared once (`Launch`, kept by the caller for them);
what is left of a call are the tensors' addresses, of whose alignment compiled code depends. The first launch for an
alignment goes through Triton's JIT, which returns what it compiled; later ones launch that. They pass addresses, since
Triton asks the driver about every tensor that it is given, and the stream, for which it would ask PyTorch.
"""

from __future__ import annotations

from typing import Any

from .. import compat


class Launch:
    """`kernel[grid](*tensors, *numbers, **constants)` with these warps and pipeline stages, for tensors to come.

    The kernel's parameters are tensors, the first of them `descriptors` tensor-memory descriptors, then numbers, then
    constants. Tensors must have the same dtypes and device at every call; it runs on the current device and stream.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], *, num_warps: int, num_stages: int = 3,
        descriptors: int = 0, **constants: Any,
    ):  # fmt: skip
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.descriptors = descriptors
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self._rest = numbers
        if compat.TRITON_LAUNCHES_WITH_CONSTANTS:
            self._rest += tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors[self.descriptors :]]
        alignment = tuple([address & 15 for address in addresses])
        run = self._compiled.get(alignment)
        if run is not None:
            run(*tensors[: self.descriptors], *addresses, *self._rest, stream=compat.current_raw_stream())
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        if compiled is not None:  # None from Triton's interpreter
            self._compiled[alignment] = compat.launcher_of(compiled, (*self.grid, 1, 1)[:3])
