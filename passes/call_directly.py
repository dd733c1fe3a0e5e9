"""Call directly: generated code calls our operators' functions themselves, without PyTorch's dispatcher.

Contract
    in      the scheduler's nodes before fusion
    out     the same nodes; those of our operators on CUDA are called as Python functions in the wrapper
            (`compile_overlap.operators.direct`)
    raises  AttributeError where this version's node of an operator cannot be named; an operator that has a lowering of its
            own is no such node

Why      An operator written in Python costs the host 20 to 40 us on its way through the dispatcher, where the computation
         of a small layer takes as long; compiled code has decided by then what the dispatcher would decide again.
"""

from __future__ import annotations

from torch._inductor.virtualized import V

from compile_overlap import compat, operators

from . import graphs
from .base import OverlapPass

_IMPORT = "from compile_overlap.operators import direct as compile_overlap_direct"


class CallDirectly(OverlapPass):
    name = "call-directly"
    devices = ("cuda",)

    def run(self, nodes: list):
        plans = filter(None, map(graphs.scheduler_plan, nodes))
        if compat.writes_cpp_wrapper() or any(self.name in plan.disabled for plan in plans):
            return nodes, 0
        called = [node.node for node in nodes if self._calls_ours(node.node)]
        for kernel in called:
            V.graph.wrapper_code.add_import_once(_IMPORT)
            kernel.set_python_kernel_name(f"compile_overlap_direct.{operators.name_of(kernel.op_overload)}")
        return nodes, len(called)

    def _calls_ours(self, kernel: object) -> bool:
        if operators.name_of(getattr(kernel, "op_overload", None)) is None:
            return False
        device = kernel.get_device()
        return device is not None and device.type in self.devices
