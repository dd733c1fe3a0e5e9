"""Generated code calls the operators' functions without the dispatcher, and computes the same."""

import pytest
import torch
import torch._inductor.config as inductor_config
from archive_double import ArchiveFFN

import passes
from compile_overlap import forward_ffn, operators, reset
from compile_overlap.recipes import exact
from passes import verify
from passes.call_directly import CallDirectly


def _answers(monkeypatch, **settings):
    """(output, wrappers, matches) of a compiled layer on one rank."""
    for name, value in {"A2A_FFN_STRICT": "1", "A2A_FFN_RECIPE": "eager_exact", **settings}.items():
        monkeypatch.setenv(name, value)
    codes, real = [], verify.check_wrapper
    monkeypatch.setattr(verify, "check_wrapper", lambda code, record: (codes.append(code), real(code, record)))
    reset()
    torch.manual_seed(0)
    ffn, x = ArchiveFFN(8, 16, 2).bfloat16(), torch.randn(4, 8, 16).bfloat16()
    before = len(passes.pass_log())
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        out = forward_ffn(ffn, x)
    matches = [report.matches for report in passes.pass_log()[before:] if report.name == CallDirectly.name]
    reset()
    return out, codes, matches


def test_operators_are_called_as_functions_on_these_devices_only(monkeypatch):
    expected, codes, matches = _answers(monkeypatch)
    assert matches == [] and "torch.ops.compile_overlap.gated_norm_forward.default(" in codes[-1]
    monkeypatch.setattr(CallDirectly, "devices", ("cpu",))
    got, codes, matches = _answers(monkeypatch)
    assert matches == [1] and "compile_overlap_direct.gated_norm_forward(" in codes[-1]
    assert "torch.ops.compile_overlap.gated_norm_forward.default(" not in codes[-1]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["torch.ops.compile_overlap.{}.default", "compile_overlap_direct.{}"])
def test_the_order_is_read_from_either_form(name):
    code = "\n".join(f"buf = {name.format(op)}(x)" for op in ("peer_put", "peer_take", "chunk_bmm_triton", "peer_finish"))
    assert verify.order_in_wrapper(code) == ["peer_put", "peer_take", "gemm", "peer_finish"]


def test_what_checks_and_remarks_name_is_not_a_call():
    """As torch 2.13 writes behind each call."""
    op = "torch.ops.compile_overlap.chunk_bmm_triton.default"
    code = f"buf = {op}(x)\nassert_size_stride(buf, (4,), (1,), '{op}')\n# buffer buf (op: {op}) is assumed to be not aligned"
    assert verify.order_in_wrapper(code) == ["gemm"]


def test_only_our_operators_have_a_name():
    assert operators.name_of(exact.row_sum) == "row_sum"
    assert operators.name_of(torch.ops.aten.bmm.default) is None and operators.name_of(None) is None
