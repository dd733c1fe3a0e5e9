"""Our batched GEMM equals cuBLAS bit for bit wherever it is allowed to take its place."""

import pytest
import torch

from compile_overlap.kernels import chunk_gemm_triton as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# tokens, rows, K, columns: first GEMMs of the default workload and of small ones, then shapes that fill no tile
SHAPES = [(4, 1024, 1280, 15360), (8, 8, 128, 512), (2, 256, 1280, 5120), (3, 37, 390, 2340), (2, 5, 40, 72)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_close_to_cublas_and_equal_where_it_is_used(shape, dtype, transposed):
    tokens, rows, inner, columns = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))

    def draw(*size):
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    left = draw(rows, tokens, inner).transpose(0, 1)
    right = draw(tokens, columns, inner).transpose(1, 2) if transposed else draw(tokens, inner, columns)
    expected, got = torch.bmm(left, right), kernel.chunk_bmm_triton(left, right)
    assert torch.allclose(got, expected, rtol=1e-2, atol=0.25)
    if kernel.beats_cublas(*shape, transposed, dtype, left.device):
        assert torch.equal(got, expected)
