"""The kernel that takes the place of Inductor's gated norm computes the same bits, in the order that Inductor chose."""

import pytest
import torch
import torch._inductor.config as inductor_config

from compile_overlap import compat
from compile_overlap.kernels import sm_count
from compile_overlap.kernels import inductor_gated_norm as kernel
from compile_overlap.kernels.exact_gated_norm import plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "length, rows, hidden, dtype",
    [
        (32, 4, 7680, torch.bfloat16),
        (32, 128, 7680, torch.bfloat16),
        (32, 512, 7680, torch.bfloat16),
        (8, 64, 1280, torch.bfloat16),
        (8, 256, 2560, torch.float16),
        (3, 342, 1924, torch.bfloat16),
        (2, 1024, 15360, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("training", [True, False])
@inductor_config.patch(dynamic_scale_rblock=False)  # timings choose among blocks where it is on
def test_an_order_is_found_and_holds(length, rows, hidden, dtype, biased, training):
    kernel.order_of.cache_clear()
    device = torch.device("cuda", torch.cuda.current_device())
    order = kernel.order_of(length, rows, hidden, biased, training, dtype, device)
    if order is None and length * rows >= 64 * sm_count(device):
        pytest.skip("timings chose a configuration that sums several rows at a time")
    assert order in kernel.ORDERS
    saved = training and biased and compat.ROUNDS_SAVED_SUMS_ONLY
    shapes = ((length, rows, 2 * hidden), (length, 1, 2 * hidden), *[(hidden,)] * 4)
    z, shift, *norms = operands = tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
    z[0, 0, : hidden // 2] *= 1e3
    z[1, 1] = 0.0

    def expression(z, shift, *norms):
        z, shift = (z + shift, None) if saved else (z, shift if biased else None)
        results = plain(z, shift, *norms, 1e-5, 1e-5)
        return (*results, z) if saved else results if training else results[:1]

    expected = compat.compiled_by_inductor(expression, operands)(*operands)
    bias = shift.squeeze(1) if biased else None
    got = kernel.unpacked(kernel.inductor_gated_norm(z, bias, *norms, 1e-5, 1e-5, saved, *order))
    assert all(map(torch.equal, got, expected[: 5 if training else 1]))


def test_no_order_where_there_is_none():
    device = torch.device("cuda", torch.cuda.current_device())
    assert kernel.order_of(2, 64, 7680, True, False, torch.float32, device) is None
    assert kernel.order_of(2, 64, 1281, True, False, torch.bfloat16, device) is None
    assert kernel.order_of(2, 64, 288, True, False, torch.bfloat16, device) is None  # a persistent reduction
    assert kernel.order_of(2, 100, 15360, True, False, torch.bfloat16, device) is None  # a split one


def test_opcheck():
    z, bias, *norms = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((2, 3, 1024), (2, 1024), *[(512,)] * 4)
    )
    torch.library.opcheck(kernel.inductor_gated_norm, (z, bias, *norms, 1e-5, 1e-5, False, 512, 4))
