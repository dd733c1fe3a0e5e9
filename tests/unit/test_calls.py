"""A call is answered by an earlier one's layer exactly when nothing that the answer depends on has changed."""

import contextlib
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_overlap
from compile_overlap import api, calls, config


@contextlib.contextmanager
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        compile_overlap.reset()


def _layer(*tensors):
    return "answered", tensors


def _changes():
    yield "shape", lambda ffn, x, patch: (torch.randn(3, 4, 8), False)
    yield "strides", lambda ffn, x, patch: (torch.randn(4, 2, 8).transpose(0, 1), False)
    yield "dtype", lambda ffn, x, patch: (x.double(), False)
    yield "requires_grad", lambda ffn, x, patch: (x.clone().requires_grad_(), False)
    yield "comp_only", lambda ffn, x, patch: (x, True)
    for name in ("fwd_mode", "bwd_mode", "gemm_backend"):
        yield name, lambda ffn, x, patch, name=name: patch.setattr(ffn, name, "other")
    yield "comm_scale", lambda ffn, x, patch: patch.setattr(ffn, "comm_scale", 3, raising=False)
    yield "eps", lambda ffn, x, patch: patch.setattr(ffn.norm_gate, "eps", 1e-3)
    yield "frozen", lambda ffn, x, patch: setattr(ffn.w1, "requires_grad", False)
    yield "no weight", lambda ffn, x, patch: patch.setattr(ffn.norm_x, "weight", None)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield hooks, lambda ffn, x, patch, hooks=hooks: patch.setitem(getattr(ffn.norm_gate, hooks), 0, print)
    yield "forward", lambda ffn, x, patch: patch.setattr(ffn.norm_x, "forward", torch.neg)
    for name in config.VARIABLES:
        yield name, lambda ffn, x, patch, name=name: patch.setenv(name, "1")


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in _changes()])
def test_a_change_is_another_call(change, monkeypatch):
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ffn, x = ArchiveFFN(4, 8, 1), torch.randn(2, 4, 8)
    calls.keep(ffn, x, False, _layer)
    assert calls.known_layer(ffn, x.clone(), False)[0] is _layer
    changed, comp_only = change(ffn, x, monkeypatch) or (x, False)
    assert calls.known_layer(ffn, changed, comp_only) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_another_mode_is_another_call(mode):
    ffn, x = ArchiveFFN(4, 8, 1), torch.randn(2, 4, 8)
    calls.keep(ffn, x, False, _layer)
    with mode():
        assert calls.known_layer(ffn, x, False) is None


def test_every_setting_is_part_of_a_call():
    read = set(re.findall("A2A_FFN_[A-Z_]+", inspect.getsource(config.Settings)))
    assert read == set(config.VARIABLES)


def test_a_layer_answers_on_its_own_group_only():
    x = torch.randn(2, 4, 8)
    with fake_ranks():
        ffn = ArchiveFFN(4, 8, 1, size=2)
        calls.keep(ffn, x, False, _layer)
        assert calls.known_layer(ffn, x, False)[0] is _layer
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="without a process group"):
            calls.known_layer(ffn, x, False)
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        assert calls.known_layer(ffn, x, False) is None


def test_the_second_call_decides_nothing(monkeypatch):
    decided = []
    monkeypatch.setattr(api, "decide", lambda *_: decided.append(1) or api.Decision("eager_exact", "add", "as set"))
    monkeypatch.setattr(api, "_layer", lambda ffn, x, *_: (_layer, (x, *api.parameters_of(ffn)), None))
    ffn = ArchiveFFN(4, 8, 1)
    for _ in range(2):
        x = torch.randn(4, 4, 8)[:2].transpose(1, 2).contiguous().transpose(1, 2)
        answer, tensors = compile_overlap.forward_ffn(ffn, x)
        assert answer == "answered" and len(tensors) == 9
        assert tensors[0].is_contiguous() and torch.equal(tensors[0], x)
    assert len(decided) == 1
    compile_overlap.reset()
    compile_overlap.forward_ffn(ffn, x)
    assert len(decided) == 2
