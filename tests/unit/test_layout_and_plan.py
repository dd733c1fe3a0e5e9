"""Shapes, chunk sizes, settings: what is refused, by name, before anything runs."""

import pytest
import torch
from archive_double import ArchiveFFN
from hypothesis import given
from hypothesis import strategies as st

import compile_overlap
from compile_overlap import plan
from compile_overlap.config import Settings
from compile_overlap.layout import Layout, check_call
from compile_overlap.notice import Delegated
from compile_overlap.probe import candidates, difference_from_reference, observed_bias_form, undecided


@pytest.fixture
def ffn():
    torch.manual_seed(0)
    return ArchiveFFN(4, 16, 2)


def test_layout(ffn):
    layout = check_call(ffn, torch.randn(3, 4, 16))
    assert layout == Layout(P=1, B=3, T=4, D=16, H=32) and (layout.L, layout.rows) == (4, 3)


def test_exchange_bytes_at_the_documented_default():
    assert Layout(P=8, B=512, T=64, D=1280, H=7680).exchange_bytes(2) == 70 * 2**20


@pytest.mark.parametrize(
    "inputs, name",
    [
        (torch.zeros(4, 16), "inputs.shape"),
        (torch.zeros(0, 4, 16), "(B)"),
        (torch.zeros(2, 4, 15), "(D)"),
        (torch.zeros(2, 5, 16), "(T)"),
        (torch.zeros(2, 4, 16, dtype=torch.int64), "inputs.dtype"),
        (torch.zeros(2, 4, 16, dtype=torch.float64), "inputs.dtype"),
        (torch.zeros(2, 4, 16, device="meta"), "inputs.device"),
        ([[0.0]], "inputs"),
    ],
)
def test_bad_inputs_are_named(ffn, inputs, name):
    with pytest.raises(ValueError, match="must be") as caught:
        compile_overlap.forward_ffn(ffn, inputs)
    assert name in str(caught.value)


@pytest.mark.parametrize("size, message", [(3, "multiple of ep_group_size = 3"), (0, "positive"), (2, "L\\*P = 4\\*2")])
def test_bad_group_sizes_are_named(ffn, size, message):
    ffn.ep_group_size = size
    with pytest.raises(ValueError, match=message):
        compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16))


def test_a_group_without_torch_distributed_is_refused(ffn):
    ffn.ep_group_size, inputs = 2, torch.zeros(2, 8, 16)
    with pytest.raises(ValueError, match="ep_group_size = 2: must be 1 without a process group"):
        compile_overlap.forward_ffn(ffn, inputs)


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from((1, 2, 8, 64)))
def test_chunk_sizes(L, chunks, quantum):
    sizes = plan.chunk_sizes(L, 2, Settings(chunks=chunks), quantum)
    assert sum(sizes) == L and len(sizes) == max(1, min(chunks, L // 2, L // quantum))
    assert min(sizes) >= min(2, L) and all(size % quantum == 0 for size in sizes[:-1])
    if quantum == 1:
        assert sorted(sizes) == list(sizes) and sizes[-1] - sizes[0] <= 1


def test_borders_on_cpu_keep_whole_vector_steps():
    assert plan.border_quantum("cuda", 3, 257) == 1
    assert plan.border_quantum("cpu", 6, 256) == 1 and plan.border_quantum("cpu", 4, 771) == 16


def test_one_rank_has_one_chunk_unless_asked_otherwise():
    assert plan.chunk_sizes(32, 1, Settings()) == (32,)
    assert plan.chunk_sizes(32, 1, Settings(chunks=2)) == (16, 16)


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("A2A_FFN_CHUNKS", "2,14,16")
    monkeypatch.setenv("A2A_FFN_RECIPE", "inductor")
    monkeypatch.setenv("A2A_FFN_BIAS", "baddbmm")
    settings = Settings.from_environment()
    assert plan.chunk_sizes(32, 2, settings) == (2, 14, 16)
    assert candidates(None, settings) == [("inductor", "baddbmm")] and not undecided(settings)
    for sizes, L in (((2, 14, 16), 8), ((1, 7), 8)):
        with pytest.raises(ValueError, match="at least 2 tokens whose sum is L = 8"):
            plan.chunk_sizes(L, 2, Settings(sizes=sizes))


@pytest.mark.parametrize(
    "name, value",
    [("A2A_FFN_CHUNKS", "0"), ("A2A_FFN_CHUNKS", "two"), ("A2A_FFN_RECIPE", "exact"), ("A2A_FFN_STRICT", "yes")],
)
def test_bad_settings_are_named(monkeypatch, ffn, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16))


def test_a_setting_that_does_not_exist_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("A2A_FFN_CHUNK", "4")
    assert Settings.from_environment() == Settings.from_environment()
    assert caplog.text.count("A2A_FFN_CHUNK: no such setting") == 1
    monkeypatch.setenv("A2A_FFN_STRICT", "1")
    with pytest.raises(ValueError, match="A2A_FFN_CHUNK: no such setting"):
        Settings.from_environment()


@pytest.mark.parametrize("bias", ["add", "baddbmm"])
@pytest.mark.parametrize("compiled_core", [False, True])
def test_the_reference_s_bias_form_is_observed(bias, compiled_core):
    assert observed_bias_form(ArchiveFFN(4, 16, 2, bias=bias, compile_core=compiled_core)) == bias


def test_the_form_the_reference_is_seen_to_use_is_tried_first(ffn):
    assert candidates(ffn, Settings())[:2] == [("eager_exact", "add"), ("eager_exact", "baddbmm")]
    assert candidates(ArchiveFFN(4, 16, 2, bias="baddbmm"), Settings(recipe="inductor"))[0] == ("inductor", "baddbmm")


def test_another_function_is_not_taken_for_the_reference(ffn):
    assert difference_from_reference(ffn, "add") is None
    ffn.norm_x.forward = torch.tanh
    assert "differs from the layer's by" in difference_from_reference(ffn, "add")


def test_an_input_with_nan_does_not_decide_against_the_layer(ffn):
    inputs = torch.randn(2, 4, 16)
    inputs[0, 0, 0] = float("nan")
    with torch.no_grad():
        assert "recipe     eager_exact, bias form add" in compile_overlap.explain(ffn, inputs)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda f: setattr(f, "fwd_mode", "sparse"), "fwd_mode"),
        (lambda f: setattr(f, "gemm_backend", "fp8"), "gemm_backend fp8"),
        (lambda f: f.norm_x.bfloat16(), "norm weights are torch.bfloat16"),
    ],
)
def test_what_the_layer_does_not_take_is_delegated(monkeypatch, caplog, ffn, change, reason):
    change(ffn)
    ffn.forward = lambda inputs, overlap, comp_only=False: inputs + 1
    inputs = torch.zeros(2, 4, 16)
    with torch.no_grad():
        assert torch.equal(compile_overlap.forward_ffn(ffn, inputs), inputs + 1)
    with pytest.raises(RuntimeError, match=f"{reason}.* cut off from autograd"):
        compile_overlap.forward_ffn(ffn, inputs)
    ffn.requires_grad_(False)
    assert torch.equal(compile_overlap.forward_ffn(ffn, inputs), inputs + 1)
    monkeypatch.setenv("A2A_FFN_STRICT", "1")
    with pytest.raises(Delegated, match=reason):
        compile_overlap.forward_ffn(ffn, inputs)


def test_a_reference_that_no_recipe_equals_is_delegated_and_explained(monkeypatch, ffn):
    reference = ffn.forward
    ffn.forward = lambda inputs, overlap="none", comp_only=False: reference(inputs, comp_only=comp_only) * 1.01
    monkeypatch.setenv("A2A_FFN_RECIPE", "eager_exact")
    inputs = torch.randn(2, 4, 16)
    with torch.no_grad():
        assert torch.equal(compile_overlap.forward_ffn(ffn, inputs), ffn.forward(inputs))
        assert "no recipe equals the reference" in compile_overlap.explain(ffn, inputs)
