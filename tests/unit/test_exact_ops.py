"""The opaque operators keep PyTorch's rules for custom operators, and their fake kernels tell the truth."""

import pytest
import torch

from compile_overlap.recipes import exact


def _inputs(dtype, biased):
    torch.manual_seed(0)
    z, bias = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 16).to(dtype)
    norms = tuple(torch.randn(8).to(dtype).float() for _ in range(4))
    return z, bias if biased else None, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_opcheck(dtype, biased):
    z, bias, norms = _inputs(dtype, biased)
    torch.library.opcheck(exact.gated_norm_op, (z, bias, *norms, 1e-5, 1e-5))
    out, *stats = exact.gated_norm_op(z, bias, *norms, 1e-5, 1e-5)
    for for_input, for_weights in ((True, True), (True, False), (False, True)):
        arguments = (out, z, bias, *norms, *stats, 1e-5, 1e-5, for_input, for_weights)
        torch.library.opcheck(exact.gated_norm_backward_op, arguments)
    torch.library.opcheck(exact.row_sum_op, (z,))
