"""The plugin inlined in an outer torch.compile of the whole block, and beside a reference whose core is compiled.

Driven as the original archive would: an FFN and a block of its own, the plugin named by `A2A_FFN_KERNEL_PLUGIN`.
"""

import kernels_on_cpu
import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from gradients import GATES, outputs_and_gradients, worst_relative
from ranks import run_on_ranks

from compile_overlap import plan
from compile_overlap.config import Settings

STRICT = {"A2A_FFN_STRICT": "1"}
BF16, FP32 = torch.bfloat16, torch.float32


class _Block:
    def __init__(self, ranks, dtype, bias, pre, grad, shape=(3, 4, 128, 2), fused=False):
        self.ranks, self.dtype, self.bias, self.pre, self.grad, self.shape = ranks, dtype, bias, pre, grad, shape
        self.fused = fused

    def __call__(self, rank):
        import passes

        if self.fused:
            kernels_on_cpu.install()
        torch.manual_seed(7 + rank)
        batch, local, dim, k = self.shape
        tokens = local * self.ranks
        ffn = ArchiveFFN(tokens, dim, k, group=dist.group.WORLD, size=self.ranks, index=rank, bias=self.bias)
        block = ArchiveBlock(ffn, tokens, dim, pre=self.pre).to(self.dtype)
        x = torch.randn(batch, tokens, dim).to(self.dtype)
        none = torch.compile(lambda t: block(t), dynamic=False, fullgraph=True)
        kernel = torch.compile(lambda t: block(t, overlap="kernel"), dynamic=False, fullgraph=True)
        upstream, error = torch.randn_like(x), 0.0
        if self.grad:
            expected, wanted = outputs_and_gradients(none, block, x, upstream)
            before = len(passes.pass_log())
            got, grads = outputs_and_gradients(kernel, block, x, upstream)
            error = worst_relative(wanted, grads)
            chunks = len(plan.chunk_sizes(local, self.ranks, Settings()))
            used = {"gated_norm_grad": chunks, "chunk_bmm_triton": 2 * chunks} if self.fused else {}
            assert kernels_on_cpu.calls == used
        else:
            with torch.no_grad():
                expected = none(x)
                before = len(passes.pass_log())
                got = kernel(x)
        ran = [(report.name, report.matches) for report in passes.pass_log()[before:]]
        return torch.equal(got, expected), error, ran


# P=4 and P=8 compile two blocks in each of their processes: minutes on two cores.
SPREAD = [
    pytest.param(_Block(2, BF16, "add", True, True), id="P2-bf16-add-pre-grad"),
    pytest.param(_Block(2, BF16, "add", True, True, fused=True), id="P2-bf16-add-pre-fused"),
    pytest.param(_Block(2, BF16, "baddbmm", False, False), id="P2-bf16-baddbmm-post"),
    pytest.param(_Block(4, BF16, "add", True, True), id="P4-bf16-add-pre-grad", marks=pytest.mark.slow),
    pytest.param(_Block(4, FP32, "baddbmm", False, True, (2, 5, 140, 3)), id="P4-fp32", marks=pytest.mark.slow),
    pytest.param(_Block(8, BF16, "baddbmm", False, False, (1, 4, 160, 3)), id="P8-bf16", marks=pytest.mark.slow),
    pytest.param(_Block(8, FP32, "add", True, True, (2, 4, 128, 2)), id="P8-fp32-grad", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("block", SPREAD)
def test_block_equals_the_compiled_reference(block, tmp_path):
    chunks = len(plan.chunk_sizes(block.shape[1], block.ranks, Settings()))
    shared = ("share-kernels", 3 if block.bias == "add" else 1)  # in `baddbmm` the biases are GEMMs' operands
    forward = [("check-exchanges", 2 * chunks), ("reorder", 6 * chunks), shared, ("pin-order", 2 * chunks)]
    backward = [("check-exchanges", 2 * chunks), ("reorder", 8 * chunks), ("inplace-gradients", 2 * chunks)]
    backward.append(("share-kernels", 1))
    expected = [*forward, ("verify", 6 * chunks)]
    if block.grad:
        expected += [*backward, ("pin-order", 2 * chunks), ("verify", 8 * chunks)]
    for equal, error, ran in run_on_ranks(block, block.ranks, tmp_path, STRICT):
        assert equal
        assert error <= GATES[block.dtype]
        assert ran == [("localize-views", (4 if block.grad else 2) * chunks), *expected]


def _compiled_core(rank):
    from compile_overlap import api

    torch.manual_seed(7 + rank)
    group = dist.group.WORLD
    ffn = ArchiveFFN(8, 128, 2, group=group, size=2, index=rank, bias="baddbmm", compile_core=True).to(BF16)
    x = torch.randn(3, 8, 128).to(BF16)
    with torch.no_grad():
        equal = torch.equal(ffn(x, overlap="kernel"), ffn(x))
    return equal, [d.recipe for known in api._DECISIONS.values() for d in known.values()]


def test_reference_with_a_compiled_core(tmp_path):
    for equal, recipes in run_on_ranks(_compiled_core, 2, tmp_path, STRICT):
        assert equal and len(recipes) == 1
