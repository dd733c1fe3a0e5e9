"""The compiled layer on gloo ranks against the archive double's eager reference: bit for bit, gradients included."""

import functools

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from gradients import outputs_and_gradients, unequal
from ranks import run_on_ranks

from compile_overlap import api, plan
from compile_overlap.config import Settings
from compile_overlap.layer import overlapped_ffn
from compile_overlap.layout import check_call, parameters_of
from compile_overlap.recipes import EAGER_EXACT

STRICT = {"A2A_FFN_STRICT": "1"}
BF16, FP32 = torch.bfloat16, torch.float32
# (ranks, [(B, L, D, k, dtype, bias form)]): L = 1, uneven chunks and H not divisible by 4 are among them.
SPREAD = [
    (1, [(3, 5, 130, 3, BF16, "add")]),
    (2, [(8, 7, 130, 3, FP32, "baddbmm"), (1, 1, 144, 6, BF16, "add")]),
]
# The same equations without compilation, which many ranks on few cores pay dearly.
UNCOMPILED = [
    (4, [(2, 4, 128, 3, BF16, "add"), (3, 6, 144, 2, FP32, "baddbmm"), (1, 1, 130, 3, BF16, "baddbmm")]),
    (8, [(1, 2, 128, 2, FP32, "add"), (2, 5, 128, 3, BF16, "baddbmm"), (1, 1, 130, 3, FP32, "add")]),
]


def _ffn(rank, ranks, case):
    batch, local, dim, k, dtype, bias = case
    torch.manual_seed(42 + rank)
    group = dist.group.WORLD if ranks > 1 else None
    ffn = ArchiveFFN(local * ranks, dim, k, group=group, size=ranks, index=rank, bias=bias).to(dtype)
    return ffn, torch.randn(batch, local * ranks, dim).to(dtype)


class _Spread:
    def __init__(self, ranks, cases):
        self.ranks, self.cases = ranks, cases

    def __call__(self, rank):
        import passes

        found = []
        for case in self.cases:
            ffn, x = _ffn(rank, self.ranks, case)
            upstream = torch.randn_like(x)
            expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
            before = len(passes.pass_log())
            got, grads = outputs_and_gradients(lambda t, f=ffn: f(t, overlap="kernel"), ffn, x, upstream)
            pins = [r.matches for r in passes.pass_log()[before:] if r.name == "pin-order"]
            with torch.no_grad():
                inference = ffn(x, overlap="kernel") if case is self.cases[0] else expected
            equal = torch.equal(got, expected) and torch.equal(inference, expected)
            found.append((equal, unequal(wanted, grads), pins))
        return found


@pytest.mark.parametrize("ranks, cases", SPREAD, ids=lambda v: f"P{v}" if isinstance(v, int) else "")
def test_output_and_gradients_equal_the_reference(ranks, cases, tmp_path):
    for results in run_on_ranks(_Spread(ranks, cases), ranks, tmp_path, STRICT):
        for case, (equal, differing, pins) in zip(cases, results):
            assert equal, case
            assert differing == [], case
            quantum = plan.border_quantum("cpu", case[0] * ranks, case[2] * case[3])
            chunks = len(plan.chunk_sizes(case[1], ranks, Settings(), quantum))
            assert pins == ([2 * chunks, 2 * chunks] if ranks > 1 else []), case


class _Uncompiled(_Spread):
    def __call__(self, rank):
        found = []
        for case in self.cases:
            ffn, x = _ffn(rank, self.ranks, case)
            layout = check_call(ffn, x)
            candidate = EAGER_EXACT, case[5]
            static = api._static(ffn, layout, Settings(), candidate, comp_only=False)
            upstream = torch.randn_like(x)
            expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
            run = functools.partial(_run_layer, ffn, static)
            got, grads = outputs_and_gradients(run, ffn, x, upstream)
            found.append((torch.equal(got, expected), unequal(wanted, grads)))
        return found


def _run_layer(ffn, static, inputs):
    return overlapped_ffn(inputs, *parameters_of(ffn), **static)


@pytest.mark.parametrize("ranks, cases", UNCOMPILED, ids=lambda v: f"P{v}" if isinstance(v, int) else "")
def test_the_equations_equal_the_reference_on_more_ranks(ranks, cases, tmp_path):
    for results in run_on_ranks(_Uncompiled(ranks, cases), ranks, tmp_path, STRICT):
        assert results == [(True, [])] * len(cases)


def _decisions(rank):
    """What the layer answers in the corners: each entry must be True on every rank."""
    import compile_overlap
    from compile_overlap import api

    ffn, x = _ffn(rank, 2, (3, 4, 128, 2, BF16, "add"))
    other, _ = _ffn(rank, 2, (3, 4, 128, 2, BF16, "baddbmm"))
    kept = x.clone()
    results = {}
    with torch.no_grad():
        strided = x.transpose(1, 2).contiguous().transpose(1, 2)
        results["non-contiguous"] = torch.equal(ffn(strided, overlap="kernel"), ffn(x))
        results["not mutated"] = torch.equal(x, kept)
        calls = [(ffn, x), (other, x), (ffn, x[:1]), (other, x[:1]), (ffn, x), (other, x)]
        results["interleaved"] = all(torch.equal(f(t, overlap="kernel"), f(t)) for f, t in calls)
        one = torch.empty_strided((1, *x.shape[1:]), (x[0].numel() * (1 + rank), x.shape[2], 1), dtype=BF16).copy_(x[:1])
        results["any stride of an axis of one"] = torch.equal(ffn(one, overlap="kernel"), ffn(x[:1]))
        comp = ffn(x, overlap="kernel", comp_only=True)
        results["comp-only"] = torch.equal(comp, ffn._forward_comp_only(x))
        ffn.comm_scale = 2
        results["comm-scale"] = torch.equal(ffn(x, overlap="kernel"), ffn(x))
        ffn.comm_scale = 1
        text = compile_overlap.explain(ffn, x)
        results["explained"] = "eager_exact, bias form add" in text and "gloo" in text
    for parameter in (ffn.w1, ffn.bout, ffn.norm_x.weight):
        parameter.requires_grad_(False)
    upstream = torch.randn_like(x)
    expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
    got, grads = outputs_and_gradients(lambda t: ffn(t, overlap="kernel"), ffn, x, upstream)
    results["partly frozen"] = torch.equal(got, expected) and unequal(wanted, grads) == []
    recipes = {d.recipe for known in api._DECISIONS.values() for d in known.values()}
    results["no delegation"] = recipes == {"eager_exact"}
    return results


def test_corners(tmp_path):
    for results in run_on_ranks(_decisions, 2, tmp_path, STRICT):
        assert results == dict.fromkeys(results, True)


def _delegations(rank):
    from unittest import mock

    import compile_overlap
    from compile_overlap import compiler

    ffn, x = _ffn(rank, 2, (2, 2, 128, 2, FP32, "add"))
    results = {}
    with torch.no_grad():
        expected = ffn(x)
        with torch.autocast("cpu", dtype=BF16):
            results["autocast"] = torch.equal(ffn(x, overlap="kernel"), ffn(x))
        broken = RuntimeError("no compiler here") if rank == 1 else None
        real = compiler.compile_fx
        with mock.patch.object(compiler, "compile_fx", side_effect=broken, wraps=None if broken else real):
            results["compilation fails on rank 1"] = torch.equal(ffn(x, overlap="kernel"), expected)
        results["and is not tried again"] = torch.equal(ffn(x, overlap="kernel"), expected)
        (reason,) = compiler._LAYERS.values()
        results["for a reason"] = ("no compiler here" if rank == 1 else "on another rank") in reason
        compile_overlap.reset()
        results["and works afterwards"] = torch.equal(ffn(x, overlap="kernel"), expected)
        mismatched = torch.cat((x,) * (2 + rank))
        try:
            ffn(mismatched, overlap="kernel")
        except ValueError as error:
            results["ranks disagree"] = "inputs.shape" in str(error)
    return results


def test_delegation_is_agreed_by_the_group(tmp_path):
    for results in run_on_ranks(_delegations, 2, tmp_path):
        assert results == dict.fromkeys(results, True) and len(results) == 6


def _sub_groups(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    torch.manual_seed(rank)
    ffn = ArchiveFFN(8, 128, 2, group=mine, size=2, index=dist.get_rank(mine))
    x = torch.randn(2, 8, 128)
    outside = ArchiveFFN(8, 128, 2, group=groups[1 - rank % 2], size=2, index=0)
    try:
        outside(x, overlap="kernel")
        refused = False
    except ValueError as error:
        refused = "ep_group" in str(error)
    with torch.no_grad():
        return refused and torch.equal(ffn(x, overlap="kernel"), ffn(x))


def test_sub_groups(tmp_path):
    assert run_on_ranks(_sub_groups, 4, tmp_path, STRICT) == [True] * 4
