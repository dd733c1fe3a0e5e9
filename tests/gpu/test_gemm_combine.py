"""The GEMM that stores into the peers' outputs equals cuBLAS bit for bit, and writes nothing else."""

import functools

import pytest
import torch

from compile_overlap.kernels import gemm_combine as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# tokens, ranks, batch, K, D: the default workload's chunk, then rows, K and D that fill no tile, no vector, no block
SHAPES = [(4, 2, 512, 7680, 1280), (3, 2, 20, 768, 128), (2, 4, 33, 208, 100), (5, 2, 2, 96, 36), (2, 8, 9, 80, 10)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", [kernel.NO_BIAS, kernel.ADD, kernel.BADDBMM])
def test_equals_cublas(shape, dtype, transposed, form):
    tokens, ranks, batch, inner, columns = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))

    def draw(*size):
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    left = draw(tokens, ranks * batch, inner)
    right = draw(tokens, columns, inner).transpose(1, 2) if transposed else draw(tokens, inner, columns)
    bias = draw(tokens, columns) if form else None
    whole, first = tokens + 3, 2
    outs = [torch.full((batch, whole, columns), 7.0, device="cuda", dtype=dtype) for _ in range(ranks)]
    addresses = torch.tensor([out.data_ptr() for out in outs], device="cuda")
    kernel.gemm_combine(left, right, bias, addresses, batch, whole, first, form)

    expected = torch.bmm(left, right)
    if form == kernel.ADD:
        expected = expected + bias.unsqueeze(1)
    elif form == kernel.BADDBMM:  # one rounding; cuBLAS has it so for some shapes only, and the probe tells
        expected = (torch.bmm(left.float(), right.float()) + bias.float().unsqueeze(1)).to(dtype)
    same = torch.equal if form != kernel.BADDBMM else functools.partial(torch.allclose, rtol=1e-2, atol=0.25)
    for out, rows in zip(outs, expected.split(batch, dim=1)):
        assert same(out[:, first : first + tokens], rows.transpose(0, 1))
        assert (out[:, :first] == 7).all() and (out[:, first + tokens :] == 7).all()


@pytest.mark.parametrize("inner", [64, 72, 200, 208])
def test_the_probe_tells_where_cublas_sums_in_another_order(inner):
    """cuBLAS takes another kernel where K is no multiple of 16."""
    arguments = (2, 132, inner, 100, False, kernel.ADD, torch.bfloat16, torch.device("cuda"))
    assert kernel.agrees_with_cublas(*arguments) or inner % 16
