"""The whole layer through the peers' memory equals the sequential reference, forward bit for bit, and trains.

Ranks as in `test_peers`: on two GPUs with NCCL, or sharing one with gloo.
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from gradients import outputs_and_gradients, worst_relative
from ranks import run_on_ranks
from test_peers import P, pytestmark, start  # noqa: F401  the same machines

CASES = [((4, 16, 128, 2), "1"), ((16, 8, 96, 3), "2"), ((64, 16, 640, 2), "2,6")]


def _layers(rank, block):
    device = torch.device("cuda", torch.cuda.current_device())
    os.environ.update(A2A_FFN_STRICT="1", A2A_FFN_KERNEL_PLUGIN="compile_overlap", A2A_FFN_TRANSPORT="peers")
    import passes

    results = []
    for (B, T, D, k), chunks in CASES:
        os.environ["A2A_FFN_CHUNKS"] = chunks
        torch._dynamo.reset()
        torch.manual_seed(3 + rank)
        ffn = ArchiveFFN(T, D, k, group=dist.group.WORLD, size=P, index=rank).to(device, torch.bfloat16)
        model = ArchiveBlock(ffn, T, D, pre=True).to(device, torch.bfloat16) if block else ffn
        x, upstream = (torch.randn(B, T, D, device=device, dtype=torch.bfloat16) for _ in range(2))

        def call(overlap, model=model):
            run = lambda t: model(t, overlap=overlap)  # noqa: E731
            return torch.compile(run, dynamic=False) if block else run

        before = len(passes.pass_log())
        expected, wanted = outputs_and_gradients(call("none"), model, x, upstream)
        got, grads = outputs_and_gradients(call("kernel"), model, x, upstream)
        with torch.no_grad():
            inferred = call("kernel")(x)
        lowered = sum(report.name == "lower-to-peers" for report in passes.pass_log()[before:])
        results.append(
            (torch.equal(got, expected), torch.equal(inferred, expected), lowered, worst_relative(wanted, grads))
        )
    return results


@pytest.mark.parametrize("block", [False, True], ids=["eager", "compiled"])
def test_equals_none(block, tmp_path):
    for results in run_on_ranks(functools.partial(_layers, block=block), P, tmp_path, start=start):
        for equal, inferred, lowered, worst in results:
            assert equal and inferred
            assert lowered == 3  # forward, backward, and the forward without gradients
            assert worst < 2e-2
