"""Pin: the order of the FX graph's extern calls survives Inductor's fusion, memory reordering and scheduling.

Contract
    in      the scheduler's nodes before fusion, in FX order
    out     the same nodes; where they hold an exchange of ours, each extern node (collective, wait, GEMM, opaque
            operator) depends on the extern node before it. Fused kernels stay free to move and fuse between two
            extern nodes, but not across chunks: an epilogue reads its GEMM and feeds the next one.
    raises  `ContractError` when an exchange of ours is not an extern node

Why      The chunks' epilogues share the norm weights, so Inductor would fuse them into one kernel and pull every GEMM
         before it. On 2.6.0 that even gives invalid code: ancestors are computed before the dependencies between
         collectives are added, so fusion misses a cycle; they are computed again here.
"""

from __future__ import annotations

from torch._inductor.scheduler import ExternKernelSchedulerNode

from compile_overlap.compat import order_dep

from . import graphs
from .base import ContractError, OverlapPass


class PinOrder(OverlapPass):
    name = "pin-order"

    def run(self, nodes: list):
        ours = [node for node in nodes if graphs.is_our_collective(node)]
        if not ours:
            return nodes, 0
        strays = [node.get_name() for node in ours if not isinstance(node, ExternKernelSchedulerNode)]
        if strays:
            raise ContractError(f"exchanges that are not extern nodes: {strays}")
        chained = [node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
        for before, node in zip(chained, chained[1:]):
            mutating = next(iter(node.get_buffer_names()))
            for name in before.get_buffer_names():
                node.add_fake_dep(order_dep(name, mutating))
        scheduler = nodes[0].scheduler
        scheduler.nodes = nodes
        scheduler.compute_ancestors()
        return nodes, len(ours)
