"""The whole layer through the peers' memory equals the sequential reference, forward bit for bit, and trains.

Ranks have GPUs of their own or share them, as in `test_peers`.
"""

import functools
import os

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from gradients import outputs_and_gradients, worst_relative
from ranks import run_on_ranks
from test_peers import GPUS, SHARING, pytestmark, start  # noqa: F401  the same machines

CASES = [
    ((4, 16, 128, 2), "1", "HEAD"), ((16, 8, 96, 3), "2", "STRICT"), ((64, 16, 640, 2), "4,4", "HEAD"),
    ((64, 16, 640, 2), "2,6", "OWN_FIRST"),
]  # fmt: skip


def _layers(rank, ranks, cases, block):
    # Where the reference's blocks are scaled, timings choose among them.
    with inductor_config.patch(dynamic_scale_rblock=False, emulate_precision_casts=block == "pre"):
        return _results(rank, ranks, cases, block)


def _results(rank, ranks, cases, block):
    device = torch.device("cuda", torch.cuda.current_device())
    os.environ.update(A2A_FFN_STRICT="1", A2A_FFN_KERNEL_PLUGIN="compile_overlap", A2A_FFN_TRANSPORT="peers")
    import passes

    results = []
    for (B, T, D, k), chunks, early in cases:
        os.environ.update(A2A_FFN_CHUNKS=chunks, A2A_FFN_HEAD="0", A2A_FFN_OWN_FIRST="0")
        os.environ[f"A2A_FFN_{early}"] = "2" if early == "HEAD" else "1"
        torch._dynamo.reset()
        torch.manual_seed(3 + rank)
        ffn = ArchiveFFN(T, D, k, group=dist.group.WORLD, size=ranks, index=rank).to(device, torch.bfloat16)
        model = ArchiveBlock(ffn, T, D, pre=block == "pre") if block in ("pre", "post") else ffn
        model = model.to(device, torch.bfloat16)
        x, upstream = (torch.randn(B, T, D, device=device, dtype=torch.bfloat16) for _ in range(2))

        def call(overlap, compiled=bool(block), model=model):
            run = lambda t: model(t, overlap=overlap)  # noqa: E731
            return torch.compile(run, dynamic=False) if compiled else run

        before = len(passes.pass_log())
        expected, wanted = outputs_and_gradients(call("none"), model, x, upstream)
        if block and ranks > GPUS:  # over gloo with CUDA tensors the compiled reference's gradients are wrong
            _, wanted = outputs_and_gradients(call("none", compiled=False), model, x, upstream)
        got, grads = outputs_and_gradients(call("kernel"), model, x, upstream)
        with torch.no_grad():  # the reference may round otherwise than in training
            inferred = torch.equal(call("kernel")(x), call("none")(x))
        names = [report.name for report in passes.pass_log()[before:]]
        counts = names.count("lower-to-peers"), names.count("call-directly")
        results.append((torch.equal(got, expected), inferred, counts, worst_relative(wanted, grads)))
    return results


# A norm before the layer is Inductor's, in one kernel with the reference's pack and in another with our layer: it is rounded
# only in one of them unless Inductor rounds as eager does, and even then may differ at large sizes in the last bit before.
@pytest.mark.parametrize(
    "ranks, cases, block",
    [
        (2, CASES, None), (2, CASES[1:], "alone"), (2, CASES[1:2], "post"), (2, CASES[1:2], "pre"),
        (4, CASES[:1], None), (8, CASES[:1], None),
    ],
)  # fmt: skip
def test_equals_none(ranks, cases, block, tmp_path):
    if ranks > GPUS and not SHARING:
        pytest.skip("this torch has no symmetric memory for ranks that share a GPU")
    job = functools.partial(_layers, ranks=ranks, cases=cases, block=block)
    for results in run_on_ranks(job, ranks, tmp_path, start=start):
        for equal, inferred, counts, worst in results:
            assert equal and inferred
            assert counts == (3, 3)  # forward, backward, and the forward without gradients
            assert worst < 2e-2
