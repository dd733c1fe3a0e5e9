"""Share kernels: equal chunks compile to the same kernels.

Contract
    in      a post-grad graph that may hold our layers
    out     the same graph; where it holds our exchanges, `compile_overlap::parts`, which Inductor calls as it is, makes
            - the split of a bias (a graph input, along its first axis, whose parts generated kernels read), and
            - the tokens of each chunk (a split, or slices that are one), which packs of first exchanges copy
    raises  nothing: a graph without such splits has nothing to share

Why      Inductor folds the offset of a view into the loads of the kernel that reads it, so that the epilogues and packs of
         equal chunks differed in one constant, and each was compiled. A part is a tensor of its own, without a copy.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch

from compile_overlap.operators import LIBRARY, TAGS

from . import graphs
from .base import OverlapPass
from .discover import GEMMS

aten = torch.ops.aten
LIBRARY.define("parts(Tensor(a) whole, SymInt[] sizes, int dim) -> Tensor(a)[]", tags=TAGS)
LIBRARY.impl("parts", lambda whole, sizes, dim: whole.split_with_sizes(sizes, dim), "CompositeExplicitAutograd")
_PACKING = graphs.VIEWS | {aten.reshape.default, aten.clone.default}


class ShareKernels(OverlapPass):
    name = "share-kernels"

    def run(self, graph: torch.fx.Graph):
        starts = graphs.starts(graph, self.name)
        if not starts and not graphs.puts(graph, self.name):
            return graph, 0
        packing = _packing(starts)
        splits = [node for node in graph.nodes if _is_split(node) and (_of_bias(node) or _for_packs(node, packing))]
        for node in splits:
            node.args, node.kwargs = (node.args[0], node.args[1], _dim(node)), {}
            node.target = torch.ops.compile_overlap.parts.default
        sliced = _sliced(graph, packing)
        for slices in sliced:
            _replace_by_parts(graph, slices)
        return graph, len(splits) + len(sliced)


def _packing(starts: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """The views and copies between what an exchange sends and the tensor that they are made of."""
    found = set()
    for start in starts:
        node = start.args[0]
        while node.target in _PACKING:
            found.add(node)
            node = node.args[0]
    return found


def _is_split(node: torch.fx.Node) -> bool:
    several = node.target is aten.split_with_sizes.default and len(node.args[1]) > 1
    return several and all(user.target is operator.getitem for user in node.users)


def _dim(node: torch.fx.Node) -> int:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)


def _of_bias(node: torch.fx.Node) -> bool:
    return _dim(node) == 0 and node.args[0].op == "placeholder" and not _feeds_operator(node)


def _for_packs(node: torch.fx.Node, packing: set[torch.fx.Node]) -> bool:
    return node in packing and all(set(part.users) <= packing for part in node.users)


def _sliced(graph: torch.fx.Graph, packing: set[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """Slices for packs that together are one tensor, in the order of their places in it."""
    groups = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        if node in packing and len(node.args) == 4 and not node.kwargs and set(node.users) <= packing:
            groups[node.args[0], node.args[1]].append(node)
    found = []
    for (whole, dim), slices in groups.items():
        slices.sort(key=lambda node: node.args[2])
        ends = [0, *(node.args[3] for node in slices)]
        length = whole.meta["val"].shape[dim]
        if len(slices) > 1 and [node.args[2] for node in slices] == ends[:-1] and ends[-1] >= length:
            found.append(slices)
    return found


def _replace_by_parts(graph: torch.fx.Graph, slices: list[torch.fx.Node]) -> None:
    whole, dim = slices[0].args[:2]
    sizes = [node.meta["val"].shape[dim] for node in slices]
    with graph.inserting_before(next(node for node in graph.nodes if node in slices)):
        parts = graph.call_function(torch.ops.compile_overlap.parts.default, (whole, sizes, dim))
        parts.meta["val"] = [node.meta["val"] for node in slices]
        for index, node in enumerate(slices):
            part = graph.call_function(operator.getitem, (parts, index))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in slices:
        graph.erase_node(node)


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
