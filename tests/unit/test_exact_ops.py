"""The opaque operators keep PyTorch's rules for custom operators, and their fake kernels tell the truth."""

import pytest
import torch

from compile_overlap import compat, peers  # noqa: F401  registers operators
from compile_overlap.kernels import exact_gated_norm as kernel
from compile_overlap.recipes import exact
from passes import share_kernels  # noqa: F401  registers one more


def _inputs(dtype, biased):
    torch.manual_seed(0)
    z, bias = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 16).to(dtype)
    norms = tuple(torch.randn(8).to(dtype) for _ in range(4))
    return z, bias if biased else None, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_opcheck(dtype, biased):
    z, bias, norms = _inputs(dtype, biased)
    torch.library.opcheck(exact.gated_norm_forward, (z, bias, *norms, 1e-5, 1e-5))
    out, *stats = kernel.unpacked(exact.gated_norm_forward(z, bias, *norms, 1e-5, 1e-5))
    arguments = (out, z, bias, *norms, *stats, 1e-5, 1e-5)
    torch.library.opcheck(exact.norm_gradients, arguments)
    for for_weights in (True, False):
        torch.library.opcheck(exact.gated_norm_backward, (*arguments, for_weights))
    torch.library.opcheck(exact.row_sum, (z,))


def test_operators_are_given_their_arguments_as_they_were_traced():
    """Without a layout tag 2.6.0 copies what is not contiguous, and sums over rows then run in another order."""
    named = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("compile_overlap::")]
    assert len(named) >= 12
    for name in named:
        assert set(compat.LAYOUT_TAGS) <= set(getattr(torch.ops.compile_overlap, name.split("::")[1]).default.tags), name


def test_fused_backward_says_what_it_returns():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from compile_overlap.kernels.gated_norm_grad import gated_norm_grad

    length, rows, hidden = 2, 6, 8
    with FakeTensorMode():
        z = torch.empty(length, rows, 2 * hidden, dtype=torch.bfloat16)
        grad, bias = z[..., :hidden], z[:, 0]
        norms, stats = [z[0, 0, :hidden]] * 4, [torch.empty(length, rows, 1)] * 4
        outs = gated_norm_grad(grad, z, bias, *norms, *stats, True)
    assert [tuple(out.shape) for out in outs] == [(2, 6, 16), (2, 6, 8), (2, 16), (4, 8)]
    assert [out.dtype for out in outs] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(out.is_contiguous() for out in outs)
