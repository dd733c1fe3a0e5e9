"""Lower GEMMs: weight gradients in place in their slice of the whole gradient, and SMs left to the exchanges.

Contract
    in      a post-grad graph whose layers `discover` can read
    out     the same graph with `compile_overlap::chunk_bmm` in place of
            - each weight gradient that feeds a concatenation of its siblings (InPlaceGradients), and
            - each GEMM of a layer whose plan reserves SMs (ReserveSMs)
    raises  `UnknownStructure` when a weight gradient of a layer with several chunks is a result of the graph by itself, or
            a concatenation mixes weight gradients with something else

Under `max_autotune` Inductor's own templates are kept: weight gradients are copied, and no SMs are reserved.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config

from .base import OverlapPass, UnknownStructure
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
            alone = sorted(node.name for node in free if any(user.op == "output" for user in node.users))
            if alone:
                raise UnknownStructure(f"{alone}: chunks' weight gradients must feed one concatenation")
            wholes = {user for node in free for user in node.users if user.target is aten.cat.default}
            for whole in wholes:
                parts = set(whole.args[0])
                if not parts <= free or any(len(part.users) > 1 for part in parts):
                    raise UnknownStructure(f"{whole.name}: must concatenate weight gradients that nothing else reads")
                matches += sum(_lower(part, layer.plan.reserved_sms, in_place=True) for part in parts)
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
