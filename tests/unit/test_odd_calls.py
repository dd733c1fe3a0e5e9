"""Calls that the compiled layer cannot answer go to the reference, then and only then."""

import functools
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from archive_double import ArchiveFFN
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import compile_overlap


@pytest.fixture
def ffn(monkeypatch):
    monkeypatch.setenv("A2A_FFN_RECIPE", "eager_exact")
    monkeypatch.setenv("A2A_FFN_BIAS", "add")
    compile_overlap.reset()
    torch.manual_seed(0)
    yield ArchiveFFN(4, 16, 2)
    compile_overlap.reset()


def _kernel(ffn, x):
    return ffn(x, overlap="kernel")


def _answered_by_the_layer(monkeypatch, ffn, x):
    """Whether the layer answers, by making anything else an error; the result must be right."""
    with monkeypatch.context() as patch:
        patch.setenv("A2A_FFN_STRICT", "1")
        return torch.equal(_kernel(ffn, x), ffn(x))


def test_a_transform_is_answered_by_the_reference_and_the_layer_goes_on(monkeypatch, ffn):
    x = torch.randn(2, 4, 16)
    _kernel(ffn, x)
    grads = [torch.func.grad(lambda t, call=call: call(t).sum())(x) for call in (lambda t: _kernel(ffn, t), ffn)]
    assert torch.equal(*grads)
    batched = [torch.func.vmap(call)(torch.stack((x, 2 * x))) for call in (lambda t: _kernel(ffn, t), ffn)]
    assert torch.allclose(*batched)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(call(dual)).tangent for call in (lambda t: _kernel(ffn, t), ffn)]
    assert torch.equal(*tangents)
    assert _answered_by_the_layer(monkeypatch, ffn, x)


def test_operators_that_a_checkpoint_selects_are_the_reference_s(monkeypatch, ffn):
    """Compiled code writes to results that it returned before: a checkpoint that kept them would raise."""
    x = torch.randn(2, 4, 16, requires_grad=True)
    _kernel(ffn, x).sum().backward()
    expected = torch.autograd.grad(ffn(x).sum(), x)
    seen = []

    def run(t):
        return checkpoint(functools.partial(_kernel, ffn), t, use_reentrant=False, context_fn=context)

    def policy(_, operator, *args, **kwargs):
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    assert torch.equal(*expected, *torch.autograd.grad(run(x).sum(), x))
    assert torch.ops.aten.bmm.default in seen and torch.ops.aten.bmm.out not in seen
    assert _answered_by_the_layer(monkeypatch, ffn, x)


def test_a_stance_that_forbids_compiling_is_not_remembered(monkeypatch, ffn):
    x = torch.randn(2, 4, 16)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(_kernel(ffn, x), ffn(x))
    assert _answered_by_the_layer(monkeypatch, ffn, x)


def test_a_tensor_subclass_leaves_the_layer_alone(monkeypatch, ffn):
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        assert torch.equal(_kernel(ffn, TwoTensor(x, x)).a, ffn(x))
        assert _answered_by_the_layer(monkeypatch, ffn, x)
        assert torch.equal(_kernel(ffn, TwoTensor(x, x)).b, ffn(x))


def test_a_norm_of_another_kind_is_noticed(monkeypatch, ffn):
    monkeypatch.delenv("A2A_FFN_RECIPE")  # a recipe that is set is not compared with the reference
    x = torch.randn(2, 4, 16)
    _kernel(ffn, x)

    class Root(torch.nn.LayerNorm):
        def forward(self, t):
            return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + self.eps) * self.weight

    ffn.norm_x = Root(32)
    assert torch.equal(_kernel(ffn, x), ffn(x))


def test_hooks_of_a_norm_and_a_forward_of_its_own_run(monkeypatch, ffn):
    x = torch.randn(2, 4, 16)
    _kernel(ffn, x)
    doubled = ffn.norm_x.register_forward_hook(lambda norm, inputs, output: 2 * output)
    assert torch.equal(_kernel(ffn, x), ffn(x))
    doubled.remove()
    assert _answered_by_the_layer(monkeypatch, ffn, x)
    ffn.norm_gate.forward = torch.neg
    assert torch.equal(_kernel(ffn, x), ffn(x))


@pytest.mark.parametrize("shape", [(1, 4, 16), (3, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_vector_are_the_reference_s(monkeypatch, shape, dtype):
    monkeypatch.setenv("A2A_FFN_RECIPE", "eager_exact")
    ffn, x = ArchiveFFN(4, shape[2], 2).to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        assert torch.equal(_kernel(ffn, x), ffn(x))


def test_a_wrong_device_is_named_after_good_calls_too(ffn):
    _kernel(ffn, torch.randn(2, 4, 16))
    with pytest.raises(ValueError, match="inputs.device = meta"):
        _kernel(ffn, torch.randn(2, 4, 16, device="meta"))


@pytest.mark.parametrize("name", ["w1", "bout", "norm_x", "norm_gate"])
@pytest.mark.parametrize("value", ["nothing", None, 3, torch.nn.Identity()], ids=str)
def test_what_is_lost_after_good_calls_is_named(ffn, name, value):
    x = torch.randn(2, 4, 16)
    _kernel(ffn, x)
    delattr(ffn, name)
    if value != "nothing":
        setattr(ffn, name, value)
    with pytest.raises(ValueError, match=f"ffn.{name} = "):
        _kernel(ffn, x)


def test_another_thread_may_compile_meanwhile(monkeypatch, ffn):
    x = torch.randn(2, 4, 16)
    _kernel(ffn, x)
    compiling, done = threading.Event(), threading.Event()

    def backend(graph, inputs):
        compiling.set()
        done.wait(60)
        return graph.forward

    thread = threading.Thread(target=lambda: torch.compile(lambda t: t + 1, backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert compiling.wait(60)
        assert _answered_by_the_layer(monkeypatch, ffn, x)
    finally:
        done.set()
        thread.join()


def test_first_calls_from_several_threads(ffn):
    x, results = torch.randn(2, 4, 16), []
    with torch.no_grad():
        expected = ffn(x)

    def call():
        with torch.no_grad():
            results.append(torch.equal(_kernel(ffn, x), expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
