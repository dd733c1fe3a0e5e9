"""Localize: views of parameters stand just before their first use, so that the partitioner treats all chunks alike.

Contract
    in      a joint graph (before it is split into forward and backward) that may hold our layers
    out     the same graph; where it holds an exchange of ours, each node that is a pure view of graph inputs (split,
            getitem, slice, unsqueeze, permute, ...) is moved down to its first user
    raises  nothing: a graph without such nodes has nothing to localize

Why      The min-cut partitioner bans recomputation by distance in graph order ("long fusible chains", "used far
         apart"). Weights split at the top of the layer are far from the last chunk's GEMMs, so that later chunks
         saved other tensors than the first. What is saved is rounded, so that the compiled forward with grad then
         differed from the unchunked layer's.
"""

from __future__ import annotations

import torch

from . import graphs
from .base import OverlapPass


class LocalizeViews(OverlapPass):
    name = "localize-views"

    def run(self, graph: torch.fx.Graph):
        exchanges = len(graphs.starts(graph, unless_disabled=self.name))
        if not exchanges:
            return graph, 0
        pure = set()
        for node in graph.nodes:
            sources = node.all_input_nodes
            if node.op == "placeholder" or (
                node.op == "call_function" and node.target in graphs.VIEWS and all(source in pure for source in sources)
            ):
                pure.add(node)
        order = {node: index for index, node in enumerate(graph.nodes)}
        # From the last node up: a view's own users, views among them, are in place before it moves next to them.
        for node in reversed(list(graph.nodes)):
            if node in pure and node.op != "placeholder" and node.users:
                first = min(node.users, key=order.__getitem__)
                first.prepend(node)
                order[node] = order[first] - 1e-6
        return graph, exchanges
