"""A layer that is lowered to the peers' memory computes what it computed before, forward and backward.

On CPU: the lowered operators are played by gloo collectives (`peers_by_gloo`), everything else is as in use.
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from gradients import outputs_and_gradients, unequal
from ranks import run_on_ranks


def _against_collectives(rank, ranks, recipe, bias, chunks, block, fused, early):
    import compile_overlap
    import kernels_on_cpu
    import passes
    import peers_by_gloo

    os.environ.update(A2A_FFN_STRICT="1", A2A_FFN_KERNEL_PLUGIN="compile_overlap", A2A_FFN_CHUNKS=chunks)
    if not block:
        os.environ["A2A_FFN_RECIPE"] = recipe
    if fused:
        os.environ["A2A_FFN_GRADIENTS"] = "fast"
        kernels_on_cpu.install()
    torch.manual_seed(5 + rank)
    ffn = ArchiveFFN(8 * ranks, 16 * ranks, 2, group=dist.group.WORLD, size=ranks, index=rank, bias=bias)
    model = ArchiveBlock(ffn, 8 * ranks, 16 * ranks, pre=True) if block else ffn
    if block == "twice":  # the first layer's combine and the second one's dispatch have no norm between them
        model = torch.nn.ModuleList([ffn, model.ffn])
        model.forward = lambda t, overlap: ffn(ffn(t, overlap=overlap), overlap=overlap)
    if block == "scaled":  # backward needs the layer's output
        model = torch.nn.ModuleList([ffn])
        model.scale = torch.nn.Parameter(torch.tensor(0.5))
        model.forward = lambda t, overlap: t + model.scale * ffn(t, overlap=overlap)
    x, upstream = torch.randn(3, 8 * ranks, 16 * ranks), torch.randn(3, 8 * ranks, 16 * ranks)

    def run():
        call = (lambda t: model(t, overlap="kernel"))
        call = torch.compile(call, dynamic=False) if block else call
        before = len(passes.pass_log())
        result = outputs_and_gradients(call, model, x, upstream)
        with torch.no_grad():
            inferred = [call(x), call(2 * x), call(x)]  # from the second on without Dynamo
        return (*result, inferred), [(r.name, r.matches) for r in passes.pass_log()[before:]]

    (expected, wanted, first), _ = run()
    compile_overlap.reset()
    torch._dynamo.reset()
    peers_by_gloo.install()
    os.environ.update(A2A_FFN_TRANSPORT="peers", **{f"A2A_FFN_{early}": "2" if early == "HEAD" else "1"})
    (got, grads, inferred), log = run()
    lowered = [matches for name, matches in log if name == "lower-to-peers"]
    same = all(map(torch.equal, inferred, first)) and torch.equal(first[0], expected)
    return torch.equal(got, expected), same, unequal(wanted, grads), lowered


CASES = [
    (2, "eager_exact", "add", "2,3,3", False, False, "STRICT"),
    (2, "eager_exact", "add", "4,4", False, True, "HEAD"),
    (2, "eager_exact", "add", "1", False, False, "STRICT"),
    (2, "eager_exact", "baddbmm", "1", False, False, "OWN_FIRST"),
    (2, "inductor", "add", "4", True, True, "OWN_FIRST"),
    (2, "inductor", "add", "1", "scaled", False, "HEAD"),
    pytest.param(2, "inductor", "add", "4", True, False, "STRICT", marks=pytest.mark.slow),
    pytest.param(4, "inductor", "baddbmm", "2", True, False, "HEAD", marks=pytest.mark.slow),
    pytest.param(2, "inductor", "add", "2,6", "twice", False, "OWN_FIRST", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("ranks, recipe, bias, chunks, block, fused, early", CASES)
def test_lowered_layers_compute_the_same(ranks, recipe, bias, chunks, block, fused, early, tmp_path):
    job = functools.partial(
        _against_collectives, ranks=ranks, recipe=recipe, bias=bias, chunks=chunks, block=block, fused=fused,
        early=early,
    )  # fmt: skip
    count = int(chunks) if "," not in chunks else len(chunks.split(","))
    for equal, inferred, differing, lowered in run_on_ranks(job, ranks, tmp_path):
        assert equal and inferred and differing == []
        assert lowered == [(3 * count + 1) * (2 if block == "twice" else 1)] * 3
