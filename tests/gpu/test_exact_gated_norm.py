"""The exact gated norm on a GPU equals eager ATen bit for bit, statistics included."""

import pytest
import torch
import torch.nn.functional as F
from archive_double import ArchiveFFN
from gradients import GATES, outputs_and_gradients, unequal, worst_relative

from compile_overlap.kernels import exact_gated_norm as kernel
from compile_overlap.layer import overlapped_ffn
from compile_overlap.layout import parameters_of
from compile_overlap.recipes import ADD, BADDBMM, EAGER_EXACT, exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(2, 8, 256), (4, 4, 1152), (3, 5, 384), (2, 64, 3840), (2, 100, 7680), (1, 33, 15360), (2, 7, 390), (2, 3, 132)]


def _inputs(shape, dtype, scale):
    length, rows, hidden = shape
    generator = torch.Generator("cuda").manual_seed(hidden + rows)

    def draw(*size, gain=1.0):
        return (gain * torch.randn(size, device="cuda", generator=generator)).to(dtype)

    norms = tuple(draw(hidden) for _ in range(4))
    return draw(length, rows, 2 * hidden, gain=scale), draw(length, 2 * hidden), norms


def _eager(z, bias, norms):
    u, g = (z if bias is None else z + bias.unsqueeze(1)).chunk(2, -1)
    hidden = (u.shape[-1],)
    return F.layer_norm(u, hidden, norms[0], norms[1]) * F.silu(F.layer_norm(g, hidden, norms[2], norms[3]))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_equals_eager(shape, dtype, biased, scale):
    z, bias, norms = _inputs(shape, dtype, scale)
    bias = bias if biased else None
    out = exact.gated_norm_forward(z, bias, *norms, 1e-5, 1e-5)[0]
    assert torch.equal(out, _eager(z, bias, norms))


def test_statistics_equal_aten():
    z, bias, norms = _inputs((2, 100, 7680), torch.bfloat16, 1.0)
    assert kernel.takes(z)
    _, *stats = kernel.unpacked(kernel.forward(z, bias, *norms, 1e-5, 1e-5))
    u, g = (z + bias.unsqueeze(1)).chunk(2, -1)
    expected = []
    for half, gamma, beta in ((u, *norms[:2]), (g, *norms[2:])):
        expected += torch.ops.aten.native_layer_norm(half, [7680], gamma, beta, 1e-5)[1:]
    assert all(torch.equal(got, want) for got, want in zip(stats, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [ADD, BADDBMM])
@pytest.mark.parametrize("exact_gradients", [True, False])
def test_gradients_of_the_chunked_layer(dtype, bias, exact_gradients):
    torch.manual_seed(2)
    ffn = ArchiveFFN(6, 128, 3, bias=bias).to("cuda", dtype)
    x, upstream = torch.randn(2, 40, 6, 128, device="cuda").to(dtype)
    static = {"sizes": (2, 4), "P": 1, "group": None, "eps": (1e-5, 1e-5), "recipe": EAGER_EXACT, "bias": bias}

    def chunked(inputs):
        return overlapped_ffn(inputs, *parameters_of(ffn), **static, exact_gradients=exact_gradients)

    expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
    got, grads = outputs_and_gradients(chunked, ffn, x, upstream)
    assert torch.equal(got, expected)
    if exact_gradients:
        assert unequal(wanted, grads) == []
    assert worst_relative(wanted, grads) <= GATES[dtype]
