"""Share kernels: equal chunks compile to the same kernels.

Contract
    in      a post-grad graph that may hold our layers
    out     the same graph; where it holds our exchanges, each part of a bias (a slice along the first axis of a graph
            input that generated kernels read) is taken by `compile_overlap::part`, which Inductor calls as it is
    raises  nothing: a graph without such parts has nothing to share

Why      Inductor folds the offset of a view into the loads of the kernel that reads it, so that the epilogues of equal
         chunks differed in one constant, and each was compiled. A part is a tensor of its own, without a copy.
"""

from __future__ import annotations

import operator

import torch

from . import graphs
from .base import OverlapPass
from .discover import GEMMS

aten = torch.ops.aten
_LIBRARY = torch.library.Library("compile_overlap", "FRAGMENT")
_LIBRARY.define("part(Tensor(a) whole, int begin, int length) -> Tensor(a)")
_LIBRARY.impl("part", lambda whole, begin, length: whole.narrow(0, begin, length), "CompositeExplicitAutograd")


class ShareKernels(OverlapPass):
    name = "share-kernels"

    def run(self, graph: torch.fx.Graph):
        if not graphs.starts(graph, unless_disabled=self.name):
            return graph, 0
        matches = 0
        for node in list(graph.nodes):
            place = _part_of_input(node)
            if place is None or _feeds_operator(node):
                continue
            whole, begin, length = place
            with graph.inserting_before(node):
                part = graph.call_function(torch.ops.compile_overlap.part.default, (whole, begin, length))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)
            matches += 1
        graph.eliminate_dead_code()
        return graph, matches


def _part_of_input(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int] | None:
    """(input, begin, length) of a node that is a proper slice along the first axis of a two-dimensional graph input."""
    if node.target is operator.getitem and node.args[0].target in (aten.split_with_sizes.default, aten.split.Tensor):
        split, index = node.args
        whole, sizes, dim = split.args[0], split.args[1], (*split.args[2:], split.kwargs.get("dim", 0))[0]
        begin = sizes * index if isinstance(sizes, int) else sum(sizes[:index])
    elif node.target is aten.slice.Tensor:
        whole, dim, begin = (*node.args, 0, 0)[:3]
        begin = begin or 0
        if len(node.args) > 4 and node.args[4] != 1:
            return None
    else:
        return None
    if whole.op != "placeholder" or dim != 0 or whole.meta["val"].dim() != 2:
        return None
    length = node.meta["val"].shape[0]
    return (whole, begin, length) if length < whole.meta["val"].shape[0] and begin >= 0 else None


def _feeds_operator(node: torch.fx.Node) -> bool:
    """Whether a GEMM or an opaque operator of ours reads the node: these take views as they are."""
    users = list(node.users)
    while users:
        user = users.pop()
        if user.target in GEMMS or getattr(user.target, "namespace", "") == "compile_overlap":
            return True
        if user.target in graphs.VIEWS:
            users += user.users
    return False
