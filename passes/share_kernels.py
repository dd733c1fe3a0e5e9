"""Share kernels: equal chunks compile to the same kernels.

Contract
    in      a post-grad graph that may hold our layers
    out     the same graph; where it holds our exchanges, the split of a bias (a graph input, along its first axis, whose
            parts generated kernels read) is made by `compile_overlap::parts`, which Inductor calls as it is
    raises  nothing: a graph without such splits has nothing to share

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
_LIBRARY.define("parts(Tensor(a) whole, SymInt[] sizes) -> Tensor(a)[]")
_LIBRARY.impl("parts", lambda whole, sizes: whole.split_with_sizes(sizes), "CompositeExplicitAutograd")


class ShareKernels(OverlapPass):
    name = "share-kernels"

    def run(self, graph: torch.fx.Graph):
        if not graphs.starts(graph, self.name) and not graphs.puts(graph, self.name):
            return graph, 0
        splits = [node for node in graph.nodes if _splits_an_input(node) and not _feeds_operator(node)]
        for node in splits:
            node.target = torch.ops.compile_overlap.parts.default
            node.args, node.kwargs = node.args[:2], {}
        return graph, len(splits)


def _splits_an_input(node: torch.fx.Node) -> bool:
    if node.target is not aten.split_with_sizes.default or len(node.args[1]) == 1:
        return False
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    only_parts = all(user.target is operator.getitem for user in node.users)
    return dim == 0 and node.args[0].op == "placeholder" and only_parts


def _feeds_operator(node: torch.fx.Node) -> bool:
    """Whether a GEMM or an opaque operator of ours reads a part: these take views as they are."""
    users = list(node.users)
    while users:
        user = users.pop()
        if user.target in GEMMS or getattr(user.target, "namespace", "") == "compile_overlap":
            return True
        if user.target in graphs.VIEWS:
            users += user.users
    return False
