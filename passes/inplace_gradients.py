"""In-place gradients: each chunk's weight gradient is computed in its slice of the whole gradient, without a copy.

Contract
    in      a post-grad backward graph in which a weight's gradient is a concatenation of the chunks' GEMMs
    out     those GEMMs as `compile_overlap::weight_gradient`: the same batched GEMM, whose Inductor lowering leaves the
            memory layout open, so that the concatenation takes place where the GEMM writes (Inductor fixes the layout
            of its own `bmm`, and then copies: 470 MB at the default workload)
    raises  `ContractError` when a free GEMM of a layer with several chunks feeds no concatenation of its siblings

With `max_autotune` Inductor's own templates are kept, and so is the copy.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config

from .base import ContractError, OverlapPass
from .discover import discover

aten = torch.ops.aten


@torch.library.custom_op("compile_overlap::weight_gradient", mutates_args=())
def weight_gradient(rows_lmn: torch.Tensor, grad_lnk: torch.Tensor) -> torch.Tensor:
    """`torch.bmm`: the gradient [l,m,k] of a chunk's weights from its rows [l,m,n] and their gradient [l,n,k]."""
    return torch.bmm(rows_lmn, grad_lnk)


@weight_gradient.register_fake
def _(rows_lmn, grad_lnk):
    return rows_lmn.new_empty((rows_lmn.shape[0], rows_lmn.shape[1], grad_lnk.shape[2]))


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
                    raise ContractError(f"{node.name}: a chunk's weight gradient must feed one concatenation, not {users}")
            for node in free:
                if node.target is aten.bmm.default and not _autotuned():
                    node.target = torch.ops.compile_overlap.weight_gradient.default
                    matches += 1
        return graph, matches


def _autotuned() -> bool:
    return inductor_config.max_autotune or inductor_config.max_autotune_gemm


def register_lowering() -> None:
    """Tell Inductor how to lower `weight_gradient`; a second call changes nothing."""
    from torch._inductor import ir, lowering
    from torch._inductor.kernel.bmm import aten_bmm

    op = torch.ops.compile_overlap.weight_gradient.default
    if op in lowering.lowerings:
        return

    @lowering.register_lowering(op, type_promotion_kind=None)
    def lower(rows_lmn, grad_lnk):
        rows_lmn, grad_lnk = (ir.ExternKernel.realize_input(x) for x in (rows_lmn, grad_lnk))
        size = [rows_lmn.get_size()[0], rows_lmn.get_size()[1], grad_lnk.get_size()[2]]
        layout = ir.FlexibleLayout(rows_lmn.get_device(), rows_lmn.get_dtype(), size)
        return aten_bmm.bind((rows_lmn, grad_lnk), layout).output_node()
