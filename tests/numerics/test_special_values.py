"""Infinities, NaN, denormals and extreme magnitudes: the layer gives what `none` gives.

Forward: the same positions are NaN, and every other element has the same bits. Gradients: the same under `eager_exact`;
otherwise the same positions are NaN, and what is finite is within the checker's gates.
"""

import pytest
import torch
import torch._inductor.config as inductor_config
from archive_double import ArchiveFFN
from gradients import GATES, outputs_and_gradients, worst_relative
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from special_values import same, specials

from compile_overlap.layer import overlapped_ffn
from compile_overlap.layout import parameters_of
from compile_overlap.recipes import ADD, BADDBMM, EAGER_EXACT

# On CPU, products of at most 16**3 multiply-adds take another kernel than oneDNN's, which flushes denormals: every
# chunk's products have more.
ROWS, TOKENS, DIM, K = 3, 4, 32, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PER_EXAMPLE = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn(data, dtype, shape, generator):
    """Normal values with some of the special ones at random places; one draw may fill a row, and so a whole sum."""
    values = torch.randn(shape, generator=generator).to(dtype)
    for _ in range(data.draw(st.integers(1, 4))):
        place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        place = place if data.draw(st.booleans()) else place[:-1]
        values[place] = data.draw(st.sampled_from(specials(dtype)))
    return values


def put_into(ffn, data, dtype, generator):
    """Special values in one of the parameters, or in none."""
    names = [None, *(name for name, _ in ffn.named_parameters())]
    name = data.draw(st.sampled_from(names))
    if name is not None:
        parameter = dict(ffn.named_parameters())[name]
        with torch.no_grad():
            parameter.copy_(drawn(data, dtype, parameter.shape, generator) * parameter.std())


def test_the_comparison_sees_signs_and_places():
    zero, nan = torch.zeros(2), torch.tensor([0.0, float("nan")])
    assert same(nan, nan.clone()) and same(zero, zero.clone())
    assert not same(zero, -zero) and not same(zero, nan) and not same(nan, nan.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [ADD, BADDBMM])
@PER_EXAMPLE
@given(data=st.data(), seed=st.integers(0, 99))
def test_the_exact_equations(dtype, bias, data, seed):
    """In chunks, uncompiled: output and gradients are the reference's, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    ffn = ArchiveFFN(TOKENS, DIM, K, bias=bias).to(dtype)
    put_into(ffn, data, dtype, generator)
    x, upstream = (drawn(data, dtype, (ROWS, TOKENS, DIM), generator) for _ in range(2))
    static = {"sizes": (2, 2), "P": 1, "group": None, "eps": (1e-5, 1e-5), "recipe": EAGER_EXACT, "bias": bias}

    def chunked(inputs):
        return overlapped_ffn(inputs, *parameters_of(ffn), **static, exact_gradients=True)

    expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
    got, grads = outputs_and_gradients(chunked, ffn, x, upstream)
    assert same(got, expected)
    assert [name for name in wanted if not same(grads[name], wanted[name])] == []


@pytest.fixture(scope="module", params=[torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def compiled(request):
    """(layer, {mode: the layer compiled}), in two chunks with the recipe `inductor`."""
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(force_disable_caches=True):
        patch.setenv("A2A_FFN_CHUNKS", "2")
        patch.setenv("A2A_FFN_STRICT", "1")
        torch._dynamo.reset()
        ffn = ArchiveFFN(TOKENS, DIM, K).to(request.param)
        modes = ("none", "kernel")
        yield ffn, {m: torch.compile(lambda t, m=m: ffn(t, overlap=m), dynamic=False) for m in modes}


@PER_EXAMPLE
@given(data=st.data(), seed=st.integers(0, 99))
def test_inside_an_outer_compile(compiled, data, seed):
    """Compiled once; the forward is bit for bit what compiled `none` gives, the gradients are within the gates."""
    ffn, modes = compiled
    dtype, generator = ffn.w1.dtype, torch.Generator().manual_seed(seed)
    usual = {name: value.clone() for name, value in ffn.state_dict().items()}
    put_into(ffn, data, dtype, generator)
    x, upstream = (drawn(data, dtype, (ROWS, TOKENS, DIM), generator) for _ in range(2))
    expected, wanted = outputs_and_gradients(modes["none"], ffn, x, upstream)
    got, grads = outputs_and_gradients(modes["kernel"], ffn, x, upstream)
    ffn.load_state_dict(usual)
    assert same(got, expected)
    assert all(torch.equal(grads[name].isnan(), wanted[name].isnan()) for name in wanted)
    finite = [name for name in wanted if wanted[name].isfinite().all()]
    wanted, grads = ({name: each[name] for name in finite} for each in (wanted, grads))
    assert not finite or worst_relative(wanted, grads) <= GATES[dtype]
