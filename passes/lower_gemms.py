"""Lower GEMMs: weight gradients in place in their slice of the whole gradient, and SMs left to the exchanges.

Contract
    in      a post-grad graph whose layers `discover` can read
    out     the same graph with `compile_overlap::chunk_bmm` in place of
            - each weight gradient that feeds a concatenation of its siblings (InPlaceGradients), and
            - each GEMM of a layer whose plan reserves SMs (ReserveSMs)
    raises  `ContractError` when a free GEMM of a layer with several chunks feeds no concatenation of its siblings

Under `max_autotune` Inductor's own templates are kept: weight gradients are copied, and no SMs are reserved.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config

from .base import ContractError, OverlapPass
from .discover import discover

aten = torch.ops.aten
ops = torch.ops.compile_overlap


class InPlaceGradients(OverlapPass):
    name = "inplace-gradients"

    def run(self, graph: torch.fx.Graph):
        matches = 0
        for layer in discover(graph, unless_disabled=self.name):
            if len(layer.chunks) == 1:
                continue
            free = {node for chunk in layer.chunks for node in chunk.free}
            for node in free:
                whole = next(iter(node.users)) if len(node.users) == 1 else None
                if whole is None or whole.target is not aten.cat.default or not set(whole.args[0]) <= free:
                    users = [str(user.target) for user in node.users]
                    raise ContractError(
                        f"{node.name}: a chunk's weight gradient must feed one concatenation, not {users}"
                    )
            matches += sum(_lower(node, layer.plan.reserved_sms, in_place=True) for node in free)
        return graph, matches


class ReserveSMs(OverlapPass):
    name = "reserve-sms"

    def run(self, graph: torch.fx.Graph):
        matches = 0
        for layer in discover(graph, unless_disabled=self.name):
            if layer.plan.reserved_sms:
                nodes = [node for chunk in layer.chunks for node in (*chunk.gemms, *chunk.free)]
                matches += sum(_lower(node, layer.plan.reserved_sms, in_place=False) for node in nodes)
        return graph, matches


def _lower(node: torch.fx.Node, reserved_sms: int, in_place: bool) -> bool:
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return False
    if node.target is aten.bmm.default:
        node.target = ops.chunk_bmm.default
        node.args = (*node.args, reserved_sms, in_place)
        return True
    if node.target is aten.baddbmm.default and not node.kwargs:
        node.target = ops.chunk_baddbmm.default
        node.args = (*node.args, reserved_sms)
        return True
    return False
