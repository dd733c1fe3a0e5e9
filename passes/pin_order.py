"""Pin: the order of the FX graph survives Inductor's fusion, memory reordering and scheduling.

Contract
    in      the scheduler's nodes before fusion, in FX order
    out     the same nodes; where they hold an exchange of ours, each extern node (collective, wait, GEMM, opaque
            operator) depends on the extern node before it and on the computations in between, and a computation
            that an exchange sends depends on the extern node before it. A fused kernel may gather what stands
            between two extern nodes, and what could stand there; it never spans two chunks, since one chunk's epilogue
            is needed by a GEMM that the other chunk's epilogue comes after.
    raises  `ContractError` when an exchange of ours is not an extern node

Why      The chunks' epilogues share the norm weights, so Inductor would fuse them into one kernel and pull every GEMM
         before it. What is fused is decided on ancestors, which 2.6.0 computes before it adds the dependencies between
         collectives, so that it misses cycles and generates invalid code; they are computed again here, also for
         layers that switch the pass off. Memory reordering would gather the packs of all chunks at the start of the
         graph, where the host launches them before the first GEMM.
"""

from __future__ import annotations

from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode

from compile_overlap.compat import order_dep

from . import graphs
from .base import ContractError, OverlapPass


class PinOrder(OverlapPass):
    name = "pin-order"

    def run(self, nodes: list):
        plans = {node: graphs.scheduler_plan(node) for node in nodes}
        ours = [node for node, plan in plans.items() if plan is not None]
        if not ours:
            return nodes, 0
        strays = [node.get_name() for node in ours if not isinstance(node, ExternKernelSchedulerNode)]
        if strays:
            raise ContractError(f"exchanges that are not extern nodes: {strays}")
        pinned = [node for node in ours if self.name not in plans[node].disabled]
        if pinned:
            _chain(nodes, {node.get_name() for node in ours})
        scheduler = nodes[0].scheduler
        scheduler.nodes = nodes
        scheduler.compute_ancestors()
        return nodes, len(pinned)


def _chain(nodes: list, exchanges: set[str]) -> None:
    """Each extern node after the one before it and after all computations between the two; packs after the former.

    Taking an output of an operator that has several launches nothing and follows that operator anyway.
    """
    since: list = []
    for node in nodes:
        own = next(iter(node.get_buffer_names()))
        if isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, MultiOutput):
            for name in (name for before in since for name in before.get_buffer_names()):
                node.add_fake_dep(order_dep(name, own))
            since = []
        elif since and exchanges & {user.get_name() for output in node.get_outputs() for user in output.users}:
            for name in since[0].get_buffer_names():
                node.add_fake_dep(order_dep(name, name))  # Inductor takes it for a real mutation if it names a write
        since.append(node)
