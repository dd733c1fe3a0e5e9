"""The benchmark's exchanges and all four modes on gloo processes, against the sequential layer."""

import functools

import ranks
import torch
import torch.distributed as dist
from rankmixer.block import RankMixerBlock
from rankmixer.compiling import compile_fresh
from rankmixer.exchange import combine, dispatch
from rankmixer.ffn import PerTokenFFN

MODES = ("none", "with-sm", "sm-free", "kernel")
# Gradients that sum over rows: chunks lay the rows out differently, and norms are summed over chunks.
ROW_SUMS = {"ffn.b1", "ffn.bout", *(f"ffn.norm_{side}.{kind}" for side in ("x", "gate") for kind in ("weight", "bias"))}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


run_on_ranks = functools.partial(ranks.run_on_ranks, environment={"A2A_FFN_KERNEL_PLUGIN": "sequential_plugin"})


def exchange_job(rank):
    x = torch.tensor([[[10.0 * (rank + 1)], [10.0 * (rank + 1) + 1]]], requires_grad=True)
    dispatched = dispatch(x, dist.group.WORLD, 2)
    restored = combine(dispatched, dist.group.WORLD, 2)
    restored.backward(torch.full_like(restored, rank + 3.0))
    return {"dispatched": dispatched.tolist(), "restored": restored.flatten().tolist(), "grad": x.grad.flatten().tolist()}


def test_layout_example(tmp_path):
    first, second = run_on_ranks(exchange_job, 2, tmp_path)
    assert first["dispatched"] == [[[10.0]], [[20.0]]]
    assert second["dispatched"] == [[[11.0]], [[21.0]]]
    assert (first["restored"], second["restored"]) == ([10.0, 11.0], [20.0, 21.0])
    assert (first["grad"], second["grad"]) == ([3.0, 3.0], [4.0, 4.0])


def group_job(rank):
    """Two sub-groups of two; the first in world order, and each one's output against the full weights."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, members = groups[rank % 2], [0, 2] if rank % 2 == 0 else [1, 3]
    torch.manual_seed(5)
    whole = PerTokenFFN(4, 8, 2, dtype=torch.float32, ep_group=None)  # of the world: one token per rank
    errors = []
    for group in (groups[1 - rank % 2], dist.GroupMember.NON_GROUP_MEMBER):
        try:
            PerTokenFFN(4, 8, 2, ep_group=group)
        except ValueError as error:
            errors.append(str(error))
    ffn = PerTokenFFN(4, 8, 2, dtype=torch.float32, ep_group=mine)
    results = {"whole": [whole.ep_index, whole.ep_group_size], "errors": errors,
               "index": ffn.ep_index, "size": ffn.ep_group_size}
    full = [torch.cat(_gather(mine, weight)) for weight in ffn.local_parameters()[:4]]
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(rank))
    z = torch.einsum("btd,tdh->bth", x, full[0]) + full[1]
    u, g = z.chunk(2, -1)
    expected = torch.einsum("bth,thd->btd", ffn.norm_x(u) * torch.nn.functional.silu(ffn.norm_gate(g)), full[2]) + full[3]
    results["errors_by_mode"] = {mode: (ffn(x, overlap=mode) - expected).abs().max().item() for mode in MODES}
    results["members"] = members.index(rank)
    return results


def _gather(group, tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


def test_sub_groups_of_four_ranks(tmp_path):
    for rank, result in enumerate(run_on_ranks(group_job, 4, tmp_path)):
        assert result["whole"] == [rank, 4]
        assert (result["index"], result["size"]) == (result["members"], 2)
        assert len(result["errors"]) == 2 and all("ep_group=" in text for text in result["errors"])
        assert max(result["errors_by_mode"].values()) < 1e-4


def make_block(rank, dtype, tokens, dim, k):
    torch.manual_seed(42 + rank)
    block = RankMixerBlock(tokens, dim, k, dtype=dtype)
    block.ffn.load_plugin()
    with torch.no_grad():
        for norm in (block.ffn.norm_x, block.ffn.norm_gate, block.norm1, block.norm2):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.3, 0.3)
    return block


def run_mode(block, x, upstream, mode, compiled, grad):
    def call(leaf):
        return block(leaf, overlap=mode)

    call = compile_fresh(call) if compiled else call
    leaf = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        output = call(leaf)
    if not grad:
        return output, {}
    block.zero_grad(set_to_none=True)
    output.backward(upstream)
    return output.detach(), {"inputs": leaf.grad, **{n: p.grad for n, p in block.named_parameters() if p.grad is not None}}


def compare_modes(block, x, upstream, compiled, grad, modes=MODES[1:]):
    """{mode: [forward equal, gradient keys equal, largest relative gradient error, gradients that differ]}."""
    expected, gradients = run_mode(block, x, upstream, "none", compiled, grad)
    results = {}
    for mode in modes:
        output, found = run_mode(block, x, upstream, mode, compiled, grad)
        errors = {name: ((found[name].float() - value.float()).norm() / value.float().norm().clamp_min(1e-12)).item()
                  for name, value in gradients.items() if name in found}
        differing = [name for name, value in gradients.items() if not torch.equal(found[name], value)]
        results[mode] = [torch.equal(output, expected), gradients.keys() == found.keys(),
                         max(errors.values(), default=0.0), differing]
    return results


def eager_job(rank):
    results = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for batch, tokens, dim, k in ((4, 16, 128, 2), (1, 2, 8, 1), (3, 20, 40, 3)):
            block = make_block(rank, dtype, tokens, dim, k)
            x, upstream = torch.randn(2, batch, tokens, dim, dtype=dtype)
            for grad in (False, True):
                key = f"{name} {batch, tokens, dim, k} {'grad' if grad else 'no_grad'}"
                results[key] = compare_modes(block, x, upstream, False, grad)
            block.ffn.comm_scale = 3
            outputs = [run_mode(block, x, upstream, mode, False, True) for mode in MODES]
            block.ffn.comm_scale = 1
            plain = [run_mode(block, x, upstream, mode, False, True) for mode in MODES]
            results[key + " comm-scale"] = [
                torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], b[1][n]) for n in b[1])
                for a, b in zip(outputs, plain)]
    block.ffn.w1.requires_grad_(False)
    block.ffn.norm_x.weight.requires_grad_(False)
    results["frozen"] = compare_modes(block, x, upstream, False, True)
    return results


def assert_modes_agree(results, limit, exact_gradients):
    for mode, (equal, same_keys, error, differing) in results.items():
        assert equal, f"forward of {mode}"
        assert same_keys and error <= limit, (mode, error)
        if exact_gradients:
            assert not set(differing) - ROW_SUMS, (mode, differing)


def test_eager_modes_equal_the_sequential_layer(tmp_path):
    for results in run_on_ranks(eager_job, 2, tmp_path):
        for name, result in results.items():
            if name.endswith("comm-scale"):
                assert all(result), name
            else:
                assert_modes_agree(result, 2e-2 if "bf16" in name else 1e-5, exact_gradients=True)


def compiled_job(rank):
    torch._dynamo.utils.counters.clear()
    results = {}
    for name, dtype, grad, modes in (("bf16", torch.bfloat16, True, ("with-sm", "sm-free", "kernel")),
                                     ("fp32", torch.float32, False, ("with-sm",))):
        block = make_block(rank, dtype, 8, 64, 2)
        x, upstream = torch.randn(2, 2, 8, 64, dtype=dtype)
        results[name] = compare_modes(block, x, upstream, True, grad, modes)
    results["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return results


def test_compiled_modes_equal_the_compiled_sequential_layer(tmp_path):
    for results in run_on_ranks(compiled_job, 2, tmp_path):
        assert results.pop("graphs") >= 9
        for name, result in results.items():
            assert_modes_agree(result, LIMITS[torch.bfloat16 if "bf16" in name else torch.float32], exact_gradients=False)


def gradless_job(rank):
    ffn = PerTokenFFN(4, 8, 1, dtype=torch.float32)
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        inside = ffn(x, overlap="with-sm").requires_grad
    trained = ffn(x, overlap="with-sm").requires_grad
    ffn.requires_grad_(False)
    return [inside, trained, ffn(x, overlap="with-sm").requires_grad]


def test_pipeline_keeps_no_graph_without_grad(tmp_path):
    assert run_on_ranks(gradless_job, 2, tmp_path) == [[False, True, False]] * 2
