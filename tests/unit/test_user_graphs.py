"""Programs around the layer that change the graph the passes see; compiled and run on the fake process group."""

import logging
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from archive_double import ArchiveFFN
from test_overlap_order import fake_ranks
from torch.utils.checkpoint import checkpoint

import passes
from compile_overlap import notice

P, TOKENS, WIDTH = 2, 16, 32


def _run(monkeypatch, program, strict="1", chunks="4", config=None, **environment):
    """The (pass, matches) log of `program(layer, group)`, with C++ kernels that do nothing."""
    settings = {"A2A_FFN_STRICT": strict, "A2A_FFN_BIAS": "add", "A2A_FFN_CHUNKS": chunks, **environment}
    for name, value in {"A2A_FFN_KERNEL_PLUGIN": "compile_overlap", **settings}.items():
        monkeypatch.setenv(name, value)
    nothing = mock.patch("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", lambda *_, **__: lambda *_: None)
    before = len(passes.pass_log())
    with fake_ranks(P) as group, inductor_config.patch(force_disable_caches=True, **(config or {})), nothing:
        program(lambda: ArchiveFFN(TOKENS, WIDTH, 2, group=group, size=P, index=0))
    return [(report.name, report.matches) for report in passes.pass_log()[before:]]


def _input(gradient=True, batch=2):
    return torch.randn(batch, TOKENS, WIDTH, requires_grad=gradient)


def _call(ffn, x):
    return ffn(x, overlap="kernel")


@pytest.mark.parametrize("recipe", ["eager_exact", "inductor"])
@pytest.mark.parametrize("frozen, free", [((), 2), (("wout",), 1), (("w1", "b1"), 1)], ids=str)
def test_an_input_without_gradient(monkeypatch, recipe, frozen, free):
    def program(layer):
        ffn = layer()
        for name in frozen:
            getattr(ffn, name).requires_grad_(False)
        _call(ffn, _input(gradient=False)).sum().backward()

    log = _run(monkeypatch, program, A2A_FFN_RECIPE=recipe)
    assert dict(log)["inplace-gradients"] >= 4 * free  # with the norms' one reduction, dH is concatenated too
    assert log[-1][0] == "verify"


def _side_by_side(layer):
    first, second = layer(), layer()
    torch.compile(lambda x: _call(first, x) + _call(second, x), dynamic=False)(_input()).sum().backward()


def test_merged_exchanges_are_an_error_when_strict(monkeypatch):
    with pytest.raises(Exception, match="must depend on one chunk's first exchange alone|equal exchanges were merged"):
        _run(monkeypatch, _side_by_side)


def test_merged_exchanges_run_in_the_order_they_have(monkeypatch, caplog):
    notice._SAID.clear()
    with caplog.at_level(logging.WARNING, logger="compile_overlap"):
        log = _run(monkeypatch, _side_by_side, strict="0")
    assert sum("left as it is" in record.message for record in caplog.records) in (1, 2)
    assert "reorder" not in dict(log)


def test_a_checkpointed_layer(monkeypatch):
    def program(layer):
        ffn = layer()

        def call(x):
            return x + checkpoint(lambda inner: _call(ffn, inner), x, use_reentrant=False)

        torch.compile(call, dynamic=False)(_input()).sum().backward()

    log = _run(monkeypatch, program)
    assert [name for name, _ in log].count("reorder") == 2
    assert [name for name, _ in log].count("verify") == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_second_batch_size(monkeypatch, dynamic):
    """Under `dynamic` the tokens and the width are symbolic too."""

    def program(layer):
        ffn = layer()
        compiled = torch.compile(lambda x: _call(ffn, x), dynamic=dynamic)
        for batch in (2, 3, 5):
            assert compiled(_input(batch=batch)).shape[0] == batch

    _run(monkeypatch, program, chunks="2")


CPP = pytest.param({"cpp_wrapper": True}, [], marks=pytest.mark.skipif(
    not torch.__version__.startswith("2.6."), reason="newer C++ wrappers refuse operators written in Python"
))  # fmt: skip


@pytest.mark.parametrize("config, verified", [({"max_autotune_gemm": True}, [("verify", 8)]), CPP], ids=["autotune", "cpp"])
def test_wrappers_that_hide_their_calls_are_not_judged_by_them(monkeypatch, config, verified):
    def program(layer):
        _call(layer(), _input(gradient=False)).sum().backward()

    log = _run(monkeypatch, program, chunks="2", config=config, A2A_FFN_RECIPE="inductor")
    assert [entry for entry in log if entry[0] == "verify"][:1] == verified


def test_a_layer_that_is_not_pinned_is_not_verified(monkeypatch):
    def program(layer):
        torch.compile(lambda x, ffn=layer(): _call(ffn, x), dynamic=False)(_input()).sum().backward()

    log = _run(monkeypatch, program, A2A_FFN_DISABLE_PASSES="pin-order")
    assert "reorder" in dict(log) and "verify" not in dict(log)
