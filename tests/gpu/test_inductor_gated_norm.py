"""The kernel that takes the place of Inductor's gated norm computes the same bits, in the order that Inductor chose."""

import pytest
import torch

from compile_overlap import compat
from compile_overlap.kernels import inductor_gated_norm as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "rows, hidden, dtype",
    [
        (128, 7680, torch.bfloat16),
        (4096, 7680, torch.bfloat16),
        (512, 1280, torch.bfloat16),
        (2048, 2560, torch.float16),
        (1024, 1924, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_an_order_is_found_and_holds(rows, hidden, dtype, biased):
    device = torch.device("cuda", torch.cuda.current_device())
    order = kernel.order_of(rows, hidden, biased, dtype, device)
    assert order in kernel.ORDERS
    z, bias, *norms = (
        torch.randn(shape, device=device).to(dtype) for shape in ((2, rows // 2, 2 * hidden), (2, 2 * hidden), *[(hidden,)] * 4)
    )
    z[0, 0, : hidden // 2] *= 1e4
    z[1, 1] = 0.0
    for rounded in (False, True) if biased else (False,):
        shift = bias.unsqueeze(1)
        operands = (z + shift if rounded else z, shift, *norms)

        def expression(z, shift, *norms, rounded=rounded):
            return kernel.plain(z, shift if biased and not rounded else None, *norms, 1e-5, 1e-5)

        expected = compat.compiled_by_inductor(expression, operands)
        got = kernel.inductor_gated_norm(z, bias if biased else None, *norms, 1e-5, 1e-5, rounded, *order)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected))


def test_no_order_where_the_kernel_does_not_run():
    device = torch.device("cuda", torch.cuda.current_device())
    assert kernel.order_of(128, 7680, True, torch.float32, device) is None
    assert kernel.order_of(128, 1281, True, torch.bfloat16, device) is None


def test_opcheck():
    z, bias, *norms = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((2, 3, 1024), (2, 1024), *[(512,)] * 4)
    )
    torch.library.opcheck(kernel.inductor_gated_norm, (z, bias, *norms, 1e-5, 1e-5, False, 512, 4))
