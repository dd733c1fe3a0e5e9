"""With the fused backward the compiled block's forward still equals the reference's bit for bit."""

import pytest
import torch
import torch._inductor.config as inductor_config
from archive_double import ArchiveBlock, ArchiveFFN

from compile_overlap.kernels import gated_norm_grad


@pytest.mark.parametrize("bias", ["add", "baddbmm"])
def test_the_forward_rounds_as_the_reference(monkeypatch, bias):
    """On CPU, where the forward is compiled alike and the backward is never run."""
    monkeypatch.setenv("A2A_FFN_STRICT", "1")
    monkeypatch.setattr(gated_norm_grad, "takes", lambda z: True)
    torch._dynamo.reset()  # the bias form is the class's: code compiled for one form would answer for the other
    torch.manual_seed(1)
    ffn = ArchiveFFN(8, 256, 2, bias=bias).to(torch.bfloat16)
    block = ArchiveBlock(ffn, 8, 256, pre=True).to(torch.bfloat16)
    x = torch.randn(64, 8, 256, dtype=torch.bfloat16, requires_grad=True)
    with inductor_config.patch(force_disable_caches=True):
        expected, got = (
            torch.compile(lambda t, mode=mode: block(t, overlap=mode), dynamic=False)(x) for mode in ("none", "kernel")
        )
    assert torch.equal(got, expected)
