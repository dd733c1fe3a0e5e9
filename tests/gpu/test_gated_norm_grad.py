"""The fused backward of the gated norm against autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F

from compile_overlap.kernels.gated_norm_grad import gated_norm_grad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def _expected(grad, z, bias, norms):
    leaves = [t.double().requires_grad_() for t in (z, bias, *norms)]
    z64, bias64, gamma_x, beta_x, gamma_gate, beta_gate = leaves
    u, g = (z64 + bias64.unsqueeze(1)).chunk(2, dim=-1)
    hidden = (u.shape[-1],)
    h = F.layer_norm(u, hidden, gamma_x, beta_x) * F.silu(F.layer_norm(g, hidden, gamma_gate, beta_gate))
    h.backward(grad.double())
    return h.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 256), (3, 37, 390), (2, 130, 1000), (2, 64, 7680)], ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_gradient(dtype, shape, with_bias):
    torch.manual_seed(0)
    length, rows, hidden = shape
    z = torch.randn(length, rows, 2 * hidden, device="cuda").to(dtype)
    bias = (torch.randn(length, 2 * hidden, device="cuda") * with_bias).to(dtype)
    norms = [(torch.randn(hidden, device="cuda") + offset).to(dtype) for offset in (1, 0, 1, 0)]
    grad = torch.randn(length, rows, hidden, device="cuda").to(dtype)
    biased = z.float() + bias.float().unsqueeze(1)
    stats = []
    for half in biased.chunk(2, dim=-1):
        variance, mean = torch.var_mean(half, -1, correction=0, keepdim=True)
        stats += [mean, torch.rsqrt(variance + 1e-5)]
    dz, h, dbias, dnorms = gated_norm_grad(grad, z, bias if with_bias else None, *norms, *stats, False)
    expected_h, (expected_z, expected_bias, *expected_norms) = _expected(grad, z, bias, norms)
    pairs = [(h, expected_h), (dz, expected_z), (dbias, expected_bias), *zip(dnorms, expected_norms)]
    for got, expected in pairs:
        error = (got.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], error


def test_strided_weights_and_rounded_sums():
    """Columns of one tensor as norm weights; a sum that the forward rounded is rounded again."""
    torch.manual_seed(0)
    z, bias = torch.randn(2, 64, 512, device="cuda").bfloat16(), torch.randn(2, 512, device="cuda").bfloat16()
    columns = torch.randn(256, 4, device="cuda").bfloat16()
    grad, summed = torch.randn(2, 64, 256, device="cuda").bfloat16(), z + bias.unsqueeze(1)
    stats = []
    for half in summed.float().chunk(2, dim=-1):
        variance, mean = torch.var_mean(half, -1, correction=0, keepdim=True)
        stats += [mean, torch.rsqrt(variance + 1e-5)]
    got = gated_norm_grad(grad, z, bias, *columns.unbind(1), *stats, True)
    expected = gated_norm_grad(grad, summed, None, *columns.t().contiguous(), *stats, False)
    assert all(map(torch.equal, got, expected))
