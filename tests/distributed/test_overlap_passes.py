"""Numbers do not depend on the passes: all on, each one off, all off, and another in-flight budget."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from gradients import outputs_and_gradients, unequal
from ranks import run_on_ranks

SETTINGS = {"A2A_FFN_STRICT": "1", "A2A_FFN_RECIPE": "eager_exact", "A2A_FFN_BIAS": "add", "A2A_FFN_CHUNKS": "2,3,3"}


def _with_passes_off(rank, variants):
    import passes

    torch.manual_seed(11 + rank)
    ffn = ArchiveFFN(16, 64, 2, group=dist.group.WORLD, size=2, index=rank)
    x = torch.randn(4, 16, 64)
    upstream = torch.randn_like(x)
    expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
    results = {}
    for off in variants:
        os.environ["A2A_FFN_DISABLE_PASSES"] = off
        before = len(passes.pass_log())
        got, grads = outputs_and_gradients(lambda t: ffn(t, overlap="kernel"), ffn, x, upstream)
        ran = {report.name for report in passes.pass_log()[before:]}
        results[off] = torch.equal(got, expected), unequal(wanted, grads), sorted(ran)
    os.environ.update(A2A_FFN_DISABLE_PASSES="", A2A_FFN_IN_FLIGHT="1")
    got, grads = outputs_and_gradients(lambda t: ffn(t, overlap="kernel"), ffn, x, upstream)
    results["in flight"] = torch.equal(got, expected), unequal(wanted, grads), []
    return results


RUNNING = {"localize-views", "check-exchanges", "reorder", "inplace-gradients", "share-kernels", "pin-order"}
NAIVE = "inplace-gradients,pin-order,reorder"


@pytest.mark.parametrize(
    "variants", [("", NAIVE, "all"), pytest.param((*sorted(RUNNING), "reserve-sms", "lower-to-peers"), marks=pytest.mark.slow, id="each")]
)
def test_numbers_are_the_same_with_any_pass_switched_off(variants, tmp_path):
    job = functools.partial(_with_passes_off, variants=variants)
    for results in run_on_ranks(job, 2, tmp_path, SETTINGS):
        for off, (equal, differing, ran) in results.items():
            assert equal and differing == [], off
            if off not in ("all", "in flight"):
                # Without `reorder` no order is expected of the wrapper, without `pin-order` none is kept.
                ordered = not {"reorder", "pin-order"} & set(off.split(","))
                expected = RUNNING - set(off.split(",")) | ({"verify"} if ordered else set())
                assert set(ran) == expected, off
        assert all(results[off][2] == [] for off in results if off == "all")
