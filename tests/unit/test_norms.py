"""Our kernel for the `inductor` recipe's norm: which layers get it, and that it gets what the plain operators would."""

import pytest
import torch
import torch._inductor.config as inductor_config

from compile_overlap import norms, recipes
from compile_overlap.kernels import exact_gated_norm, gated_norm_grad, inductor_gated_norm
from compile_overlap.kernels.inductor_gated_norm import Order
from compile_overlap.layout import Layout
from compile_overlap.recipes import ADD, BADDBMM, INDUCTOR, local_ffns

LAYOUT, DEVICE = Layout(2, 4, 8, 16, 32), torch.device("cuda")


@pytest.fixture
def agreed(monkeypatch):
    """`norms.agreed` of the first of two ranks: (what the other rank found) -> names. This one finds 512 x 8."""
    monkeypatch.setattr(inductor_gated_norm, "order_of", lambda *_: Order(512, 8))
    monkeypatch.setattr(norms.groups, "attempt", lambda group, size, device, call: (call(), None))

    def run(other):
        monkeypatch.setattr(norms.groups, "all_ranks", lambda *args: args[-1] and other == Order(512, 8))
        norms.reset()
        return norms.agreed(torch.nn.Identity(), LAYOUT, torch.bfloat16, DEVICE, False, ADD)

    return run


def test_an_order_is_taken_where_all_ranks_found_it(agreed):
    assert agreed(Order(512, 8)) == ("norm512x8",)
    assert agreed(Order(1024, 8)) == () and agreed(None) == ()


def test_it_is_probed_anew_where_inductor_rounds_otherwise(agreed, monkeypatch):
    agreed(Order(512, 8))  # forgets what was agreed before
    monkeypatch.setattr(norms.groups, "all_ranks", lambda *args: args[-1])
    layer = torch.nn.Identity()
    for rounds, order in ((False, Order(512, 8)), (True, None), (False, Order(512, 8))):
        monkeypatch.setattr(inductor_gated_norm, "order_of", lambda *_, order=order: order)
        with inductor_config.patch(emulate_precision_casts=rounds):
            found = norms.agreed(layer, LAYOUT, torch.bfloat16, DEVICE, False, ADD)
        assert found == (("norm512x8",) if order else ())


def test_nothing_is_probed_for_training_where_inductor_rounds_as_eager(agreed):
    """It would round what backward reads, and the probe has no backward."""
    layer = torch.nn.Identity()
    agreed(Order(512, 8))
    with inductor_config.patch(emulate_precision_casts=True):
        assert norms.agreed(layer, LAYOUT, torch.bfloat16, DEVICE, True, ADD) == ()


@pytest.mark.parametrize("rounds_as_eager", [False, True])
def test_backward_is_plain_where_inductor_rounds_as_eager(monkeypatch, rounds_as_eager):
    """Or nothing else would read the gate, and torch 2.11 would not round it."""
    taken = []
    monkeypatch.setattr(recipes._GatedProjection, "apply", lambda z, *_: taken.append(1) or z[..., :16])
    monkeypatch.setattr(gated_norm_grad, "takes", lambda z: True)
    l, n, D, H = 2, 6, 16, 32
    weights = [torch.randn(shape, requires_grad=True) for shape in ((l, D, 2 * H), (l, 2 * H), (l, H, D), (l, D))]
    gammas = tuple(torch.randn(H, requires_grad=True) for _ in range(4))
    static = {"sizes": (l,), "rows": n, "recipe": INDUCTOR, "bias": ADD, "eps": (1e-5, 1e-5), "exact_gradients": False}
    local_ffns(*weights, gammas, **static, rounds_as_eager=rounds_as_eager)[0](torch.randn(l, n, D))
    assert bool(taken) != rounds_as_eager


def test_nothing_is_probed_without_a_gpu_or_a_peer(agreed):
    assert norms.agreed(None, LAYOUT, torch.bfloat16, torch.device("cpu"), False, ADD) == ()
    assert norms.agreed(None, Layout(1, 4, 8, 16, 32), torch.bfloat16, DEVICE, False, ADD) == ()


@pytest.mark.parametrize("bias", [ADD, BADDBMM])
def test_the_kernel_takes_the_place_of_the_plain_operators(monkeypatch, bias):
    calls = []

    def kernel(z, bias, *rest):
        weights, eps, (rounded, block, warps) = rest[:4], rest[4:6], rest[6:]
        calls.append((bias is not None, rounded, block, warps))
        return exact_gated_norm.by_aten(z, bias, *weights, *eps)

    monkeypatch.setattr(inductor_gated_norm, "inductor_gated_norm", kernel)
    l, n, D, H = 4, 6, 16, 32
    shapes = ((l, D, 2 * H), (l, 2 * H), (l, H, D), (l, D))
    weights = [torch.randn(shape) for shape in shapes]
    gammas = tuple(torch.randn(H) for _ in range(4))
    static = {"sizes": (1, 3), "rows": n, "recipe": INDUCTOR, "bias": bias, "eps": (1e-5, 1e-3), "exact_gradients": False}
    x = torch.randn(l, n, D)
    outputs = []
    with torch.no_grad():
        for triton in ((), ("norm512x4",)):
            chunks = local_ffns(*weights, gammas, **static, triton=triton)
            outputs.append(torch.cat([ffn(part) for ffn, part in zip(chunks, x.split((1, 3)))]))
    assert torch.equal(*outputs)
    assert calls == 2 * [(bias == ADD, False, 512, 4)]
