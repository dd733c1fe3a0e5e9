"""The chunked layer's equations, run eagerly at P=1, equal the unchunked reference bit for bit: output and gradients."""

import pytest
import torch
from archive_double import ArchiveFFN
from gradients import outputs_and_gradients, unequal
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_overlap import plan
from compile_overlap.config import Settings
from compile_overlap.layer import overlapped_ffn
from compile_overlap.layout import parameters_of
from compile_overlap.recipes import ADD, BADDBMM, EAGER_EXACT

torch.set_num_threads(1)


@st.composite
def cases(draw):
    case = {
        "batch": draw(st.integers(1, 9)),
        "dim": draw(st.sampled_from((128, 130, 144, 257))),
        "k": draw(st.sampled_from((2, 3))),
        "dtype": draw(st.sampled_from((torch.float32, torch.bfloat16))),
        "bias": draw(st.sampled_from((ADD, BADDBMM))),
        "seed": draw(st.integers(0, 99)),
    }
    quantum = plan.border_quantum("cpu", case["batch"], case["dim"] * case["k"])
    chunks = Settings(chunks=draw(st.integers(1, 5)))
    return {**case, "sizes": plan.chunk_sizes(draw(st.integers(1, 12)), 1, chunks, quantum)}


def _run(case, exact=True):
    tokens = sum(case["sizes"])
    torch.manual_seed(case["seed"])
    ffn = ArchiveFFN(tokens, case["dim"], case["k"], bias=case["bias"]).to(case["dtype"])
    x = torch.randn(case["batch"], tokens, case["dim"]).to(case["dtype"])

    def chunked(inputs):
        static = {"sizes": case["sizes"], "P": 1, "group": None, "eps": (1e-5, 1e-5)}
        return overlapped_ffn(
            inputs, *parameters_of(ffn), recipe=EAGER_EXACT, bias=case["bias"], exact_gradients=exact, **static
        )

    upstream = torch.randn_like(x)
    return outputs_and_gradients(ffn, ffn, x, upstream), outputs_and_gradients(chunked, ffn, x, upstream)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_output_and_every_gradient_equal_the_reference(case):
    (expected, expected_grads), (got, grads) = _run(case)
    assert torch.equal(got, expected)
    assert unequal(expected_grads, grads) == []


def test_norm_gradients_summed_over_chunks_do_not_lose_precision_with_the_number_of_chunks():
    case = {"batch": 64, "dim": 128, "k": 2, "dtype": torch.float32, "bias": ADD, "seed": 0}
    for chunks in (1, 2, 8):
        (_, expected), (_, grads) = _run({**case, "sizes": (16 // chunks,) * chunks}, exact=False)
        for name in ("norm_x.weight", "norm_gate.bias"):
            assert torch.allclose(grads[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [ADD, BADDBMM])
def test_a_changed_rounding_is_seen(bias):
    """The comparison above can fail: without the rounding of the gate the output differs."""
    case = {"batch": 4, "sizes": (2, 2), "dim": 128, "k": 2, "dtype": torch.bfloat16, "bias": bias, "seed": 1}
    torch.manual_seed(1)
    ffn = ArchiveFFN(4, 128, 2, bias=bias).bfloat16()
    x = torch.randn(4, 4, 128).bfloat16()
    exact = ffn(x)
    ffn.norm_gate.eps = 1e-2
    assert not torch.equal(ffn(x), exact)
    assert torch.equal(*(run[0] for run in _run(case)))
