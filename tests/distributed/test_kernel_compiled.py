"""The plugin inlined in an outer torch.compile of the whole block, and beside a reference whose core is compiled.

Driven as the original archive would: an FFN and a block of its own, the plugin named by `A2A_FFN_KERNEL_PLUGIN`.
"""

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from gradients import GATES, outputs_and_gradients, worst_relative
from ranks import run_on_ranks

STRICT = {"A2A_FFN_STRICT": "1"}
BF16, FP32 = torch.bfloat16, torch.float32


class _Block:
    def __init__(self, dtype, bias, pre, grad):
        self.dtype, self.bias, self.pre, self.grad = dtype, bias, pre, grad

    def __call__(self, rank):
        import passes

        torch.manual_seed(7 + rank)
        ffn = ArchiveFFN(8, 128, 2, group=dist.group.WORLD, size=2, index=rank, bias=self.bias)
        block = ArchiveBlock(ffn, 8, 128, pre=self.pre).to(self.dtype)
        x = torch.randn(3, 8, 128).to(self.dtype)
        none = torch.compile(lambda t: block(t), dynamic=False, fullgraph=True)
        kernel = torch.compile(lambda t: block(t, overlap="kernel"), dynamic=False, fullgraph=True)
        upstream, error = torch.randn_like(x), 0.0
        if self.grad:
            expected, wanted = outputs_and_gradients(none, block, x, upstream)
            before = len(passes.pass_log())
            got, grads = outputs_and_gradients(kernel, block, x, upstream)
            error = worst_relative(wanted, grads)
        else:
            with torch.no_grad():
                expected = none(x)
                before = len(passes.pass_log())
                got = kernel(x)
        ran = [(report.name, report.matches) for report in passes.pass_log()[before:]]
        return torch.equal(got, expected), error, ran


@pytest.mark.parametrize(
    "case",
    [(BF16, "add", True, True), (BF16, "baddbmm", False, False)],
    ids=["bf16-add-pre-grad", "bf16-baddbmm-post"],
)
def test_block_equals_the_compiled_reference(case, tmp_path):
    grad = case[3]
    expected = [("check-exchanges", 4), ("pin-order", 4)] * (2 if grad else 1)
    for equal, error, ran in run_on_ranks(_Block(*case), 2, tmp_path, STRICT):
        assert equal
        assert error <= GATES[case[0]]
        assert ran == [("localize-views", 8 if grad else 4), *expected]


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
