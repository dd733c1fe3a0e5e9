"""Infinities, NaN, denormals and extreme magnitudes through our kernels: what ATen, cuBLAS and Inductor make of it."""

import pytest
import torch
import torch.nn.functional as F
from special_values import same, specials

from compile_overlap import compat
from compile_overlap.kernels import gemm_combine, inductor_gated_norm
from compile_overlap.kernels.exact_gated_norm import plain
from compile_overlap.recipes import exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _drawn(dtype, *shape, seed):
    """Normal values; row n of the second dimension begins with the n-th special one, and row n + 20 is full of it."""
    values = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)
    for row, value in enumerate(specials(dtype)):
        values[0, row, 0] = value
        values[0, row + 20] = value
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_the_exact_norm_is_eager_s(dtype, biased):
    length, rows, hidden = 2, 64, 1280
    z = _drawn(dtype, length, rows, 2 * hidden, seed=0)
    bias = torch.randn((length, 2 * hidden), device="cuda").to(dtype) if biased else None
    norms = [torch.randn(hidden, device="cuda").to(dtype) for _ in range(4)]
    u, g = (z if bias is None else z + bias.unsqueeze(1)).chunk(2, -1)
    expected = F.layer_norm(u, (hidden,), *norms[:2]) * F.silu(F.layer_norm(g, (hidden,), *norms[2:]))
    assert same(exact.gated_norm_forward(z, bias, *norms, 1e-5, 1e-5)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [gemm_combine.NO_BIAS, gemm_combine.ADD])
def test_the_combining_gemm_is_cublas_s(dtype, form):
    tokens, ranks, batch, inner, columns = 4, 2, 64, 768, 128
    left, right = _drawn(dtype, tokens, ranks * batch, inner, seed=1), _drawn(dtype, tokens, inner, columns, seed=2)
    bias = torch.randn((tokens, columns), device="cuda").to(dtype) if form else None
    outs = [torch.empty((batch, tokens, columns), device="cuda", dtype=dtype) for _ in range(ranks)]
    addresses = torch.tensor([out.data_ptr() for out in outs], device="cuda")
    gemm_combine.gemm_combine(left, right, bias, addresses, batch, tokens, 0, form)
    product = torch.bmm(left, right)
    product = product + bias.unsqueeze(1) if form else product
    for out, rows in zip(outs, product.split(batch, dim=1)):
        assert same(out, rows.transpose(0, 1).contiguous())


@pytest.mark.parametrize("biased", [True, False])
def test_the_norm_in_inductor_s_order_is_inductor_s(biased):
    length, rows, hidden, dtype = 8, 64, 1280, torch.bfloat16
    device = torch.device("cuda", torch.cuda.current_device())
    order = inductor_gated_norm.order_of(length, rows, hidden, biased, False, dtype, device)
    assert order is not None
    z = _drawn(dtype, length, rows, 2 * hidden, seed=3)
    shift = torch.randn((length, 1, 2 * hidden), device="cuda").to(dtype)
    norms = [torch.randn(hidden, device="cuda").to(dtype) for _ in range(4)]

    def expression(z, shift, *norms):
        return plain(z, shift if biased else None, *norms, 1e-5, 1e-5)[:1]

    operands = (z, shift, *norms)
    (expected,) = compat.compiled_by_inductor(expression, operands)(*operands)
    bias = shift.squeeze(1) if biased else None
    packed = inductor_gated_norm.inductor_gated_norm(z, bias, *norms, 1e-5, 1e-5, False, *order)
    assert same(inductor_gated_norm.unpacked(packed)[0], expected)
