"""One call: a whole layer that exchanges through the peers' memory becomes one operator.

Contract
    in      a post-grad graph after `LowerToPeers`
    out     for each layer in one chunk of which the graph needs nothing but the output, whose norm is an operator of ours:
            `peer_layer` in place of its five or six operators (see `compile_overlap.peer_layer`); the computation and its
            order are the same
    leaves  all other layers as they are: those in several chunks, those that train, which keep what backward reads, and
            those whose norm is Inductor's
    raises  nothing

Why      Between two calls of operators generated code takes the host some 10 us, and small layers are bound by the host.
"""

from __future__ import annotations

import operator

import torch

from compile_overlap import peer_layer  # noqa: F401  registers the operator

from . import graphs, verify
from .base import OverlapPass

aten = torch.ops.aten
ops = torch.ops.compile_overlap
_ATENS_ORDER = (False, 0, 0)  # of the gated norm's sums: not Inductor's


class OneCall(OverlapPass):
    name = "one-call"

    def run(self, graph: torch.fx.Graph):
        matches = sum(_joined(graph, put) for put in graphs.puts(graph, self.name))
        if matches:
            graph.eliminate_dead_code()
            verify.expect(graph)
        return graph, matches


def _joined(graph: torch.fx.Graph, put: torch.fx.Node) -> bool:
    """Join the layer that begins with this exchange, if it can be."""
    taken = _only(put)
    if taken is not None and taken.target is ops.peer_take.default and not taken.args[7]:
        view = _only(taken)
        product = _only(view) if view is not None and _swaps(view) else None
        left = view
    else:
        product, left = taken, None
    gemm = _first_gemm(product, put, left)
    norm = _only(product) if gemm else None
    if norm is None or norm.target not in (ops.gated_norm_forward.default, ops.inductor_gated_norm.default):
        return False
    gated = _only(norm)
    combine = _only(gated) if gated is not None and gated.target is operator.getitem and gated.args[1] == 0 else None
    if norm.args[0] is not product or combine is None or combine.target is not ops.peer_gemm.default:
        return False
    finish = _only(combine)
    if combine.args[0] is not gated or finish is None or finish.args[0] != [combine]:
        return False
    source, _, _, length, P, stored, alias = put.args
    right, triton = gemm
    _, wout, bout, form, *_ = combine.args
    order = norm.args[8:] or _ATENS_ORDER
    arguments = (source, right, *norm.args[1:8], wout, bout, form, P, stored, triton, *order, finish.args[5], alias)
    with graph.inserting_before(finish):
        joined = graph.call_function(ops.peer_layer.default, arguments)
        joined.meta["val"] = finish.meta["val"]
    finish.replace_all_uses_with(joined)
    return True


def _only(node: torch.fx.Node | None) -> torch.fx.Node | None:
    """The node's only user."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _swaps(view: torch.fx.Node) -> bool:
    return view.target is aten.permute.default and list(view.args[1]) == [1, 0, 2]


def _first_gemm(
    product: torch.fx.Node | None, put: torch.fx.Node, left: torch.fx.Node | None
) -> tuple[torch.fx.Node, bool] | None:
    """(its right operand, whether it is by our kernel) of a first GEMM that reads `left`, or what was put itself."""
    if product is None or product.args[0] is not (left or put):
        return None
    if product.target is ops.peer_take_gemm.default:
        return product.args[2], product.args[8]
    ours = product.target is ops.chunk_bmm_triton.default
    return (product.args[1], ours) if ours or product.target is aten.bmm.default else None
