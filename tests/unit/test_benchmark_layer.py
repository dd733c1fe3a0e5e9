"""The benchmark's layer and block on one rank: equations, layout, initialisation, rejected input."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "research_topic_2"))

from rankmixer import backends, plugins  # noqa: E402
from rankmixer.block import RankMixerBlock, token_mix  # noqa: E402
from rankmixer.exchange import local_combine, local_dispatch  # noqa: E402
from rankmixer.ffn import PerTokenFFN  # noqa: E402
from rankmixer.pipelines.driver import chunk_bounds  # noqa: E402


def make_ffn(dtype, tokens=4, dim=8, k=3):
    torch.manual_seed(0)
    ffn = PerTokenFFN(tokens, dim, k, dtype=dtype)
    with torch.no_grad():
        for norm in (ffn.norm_x, ffn.norm_gate):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.3, 0.3)
    return ffn


def plain_ffn(ffn, x):
    z = torch.bmm(x.transpose(0, 1), ffn.w1) + ffn.b1[:, None, :]
    u, g = z.chunk(2, -1)
    h = ffn.norm_x(u) * F.silu(ffn.norm_gate(g))
    return (torch.bmm(h, ffn.wout) + ffn.bout[:, None, :]).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_equals_the_written_equations(dtype):
    ffn = make_ffn(dtype)
    x = torch.randn(3, 4, 8, dtype=dtype)
    expected = plain_ffn(ffn, x)
    for overlap in ("none", "with-sm", "sm-free"):
        assert torch.equal(ffn(x, overlap=overlap), expected)
    assert torch.equal(ffn(x, comp_only=True), expected)


def test_layer_equals_a_computation_token_by_token():
    ffn = make_ffn(torch.float32)
    x = torch.randn(3, 4, 8)

    def norm(z, weights):
        return (z - z.mean(-1, True)) / torch.sqrt(z.var(-1, keepdim=True, correction=0) + 1e-5) * weights.weight + weights.bias

    for token in range(4):
        u, g = (x[:, token] @ ffn.w1[token] + ffn.b1[token]).split(24, dim=-1)
        gate = norm(g, ffn.norm_gate)
        expected = (norm(u, ffn.norm_x) * gate * torch.sigmoid(gate)) @ ffn.wout[token] + ffn.bout[token]
        torch.testing.assert_close(ffn(x)[:, token], expected, rtol=1e-4, atol=1e-5)


def test_strided_input_gives_the_same_bits_and_is_not_written():
    ffn = make_ffn(torch.float32)
    x = torch.randn(3, 8, 4).transpose(1, 2)
    before = x.clone()
    assert torch.equal(ffn(x), ffn(x.contiguous()))
    assert torch.equal(x, before)


def test_local_layout_change_and_its_inverse():
    x = torch.arange(2 * 6 * 1.0).view(2, 6, 1)
    moved = local_dispatch(x, 3)
    assert moved.shape == (6, 2, 1)
    assert moved[:, :, 0].tolist() == [[0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]]
    assert torch.equal(local_combine(moved, 3), x)


@pytest.mark.parametrize("step", [1, 4, 64])
@pytest.mark.parametrize("local_tokens", range(1, 34))
def test_chunks_cover_the_tokens_and_hold_two_each(local_tokens, step):
    bounds = chunk_bounds(local_tokens, step)
    assert all(first % step == 0 for first, _ in bounds)
    assert [token for first, last in bounds for token in range(first, last)] == list(range(local_tokens))
    assert len(bounds) <= 4
    assert all(last - first >= min(2, local_tokens) for first, last in bounds)


def test_token_mix_transposes_heads_and_tokens():
    x = torch.arange(1 * 2 * 4).view(1, 2, 4)
    assert token_mix(x).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_block_is_post_norm_and_the_large_block_goes_on_from_it():
    torch.manual_seed(0)
    block = RankMixerBlock(4, 8, 2, large_block=True, dtype=torch.float32)
    x = torch.randn(2, 4, 8)
    y = block.norm1(x + token_mix(x))
    small = block.norm2(y + block.ffn(y))
    torch.testing.assert_close(block(x), block.norm3(small + block.dense(small)))
    block.dense = None
    assert torch.equal(block(x), small)


def test_he_uniform_bounds_and_hidden_width():
    ffn = PerTokenFFN(2, 24, 2, compute_scale=2, dtype=torch.float32)
    assert ffn.w1.shape == (2, 24, 192) and ffn.wout.shape == (2, 96, 24)
    for weight, fan_in in ((ffn.w1, 24), (ffn.wout, 96)):
        bound = (6 / fan_in) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize("arguments, options, message", [
    ((4, 8, 0), {}, "k=0"), ((4, 8, 1.5), {}, "k=1.5"), ((4, 0, 1), {}, "dim=0"), ((0, 8, 1), {}, "tokens=0"),
    ((4, 8, 1), {"comm_scale": 0}, "comm_scale=0"), ((4, 8, 1), {"fwd_mode": "dense"}, "fwd_mode='dense'"),
    ((4, 8, 1), {"gemm_backend": "magic"}, "gemm_backend='magic'"),
    ((4, 8, 1), {"gemm_backend": "fp8"}, "use gemm_backend='bmm'"),
    ((4, 8, 1), {"dtype": torch.float64}, "dtype=torch.float64"), ((4, 8, 1), {"ep_group": object()}, "ep_group="),
])
def test_layer_rejects_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PerTokenFFN(*arguments, **options)


def test_block_rejects_tokens_that_do_not_divide_dim():
    with pytest.raises(ValueError, match="dim=10: must be a multiple of tokens=4"):
        RankMixerBlock(4, 10, 1)


@pytest.mark.parametrize("inputs, message", [
    (torch.zeros(2, 4), "shape"), (torch.zeros(0, 4, 8), "shape"), (torch.zeros(2, 5, 8), "shape"),
    (torch.zeros(2, 4, 9), "shape"), (torch.zeros(2, 4, 8, dtype=torch.int64), "dtype torch.int64"),
    (torch.zeros(2, 4, 8, dtype=torch.float64), "dtype torch.float64"),
    (torch.zeros(2, 4, 8, device="meta"), "on meta"),
])
def test_layer_rejects_bad_inputs(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_ffn(torch.float32)(inputs)


def test_layer_rejects_unknown_overlap():
    with pytest.raises(ValueError, match="overlap='fast': allowed are none, with-sm, sm-free, kernel"):
        make_ffn(torch.float32)(torch.zeros(1, 4, 8), overlap="fast")


def test_optional_backends_report_without_importing():
    reports = {name: backends.report_backend(name) for name in backends.GEMM_BACKENDS}
    assert reports["bmm"].usable and not any(reports[name].usable for name in ("fused", "fp8", "cutedsl"))
    assert "SM90" in reports["cutedsl"].needs


def test_plugin_errors_name_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", "no_such_plugin_module")
    with pytest.raises(ImportError, match="A2A_FFN_KERNEL_PLUGIN='no_such_plugin_module'.*no_such_plugin_module, or .* PYTHONPATH"):
        plugins.load_plugin()
    empty = tmp_path / "empty.py"
    empty.write_text("")
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", str(empty))
    with pytest.raises(ValueError, match="must define forward_ffn"):
        plugins.load_plugin()


def test_plugin_from_a_file_is_called(monkeypatch, tmp_path):
    source = tmp_path / "doubling.py"
    source.write_text("def forward_ffn(ffn, inputs, *, comp_only=False):\n"
                      "    return 2 * ffn.forward(inputs, overlap='none', comp_only=comp_only)\n")
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", str(source))
    ffn, x = make_ffn(torch.float32), torch.randn(2, 4, 8)
    assert torch.equal(ffn(x, overlap="kernel"), 2 * ffn(x))
