"""Exchanges through the peers' memory carry named ranges while a profiler runs, and are the same without one."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch.profiler import ProfilerActivity, profile

RANKS, BATCH, SIZES, WIDTH = 2, 2, (1, 2), 24


def _calls(rank, folder):
    import socket

    import symmetric_on_cpu

    from compile_overlap import peers, ranges, rooms
    from compile_overlap.kernels import gemm_combine

    symmetric_on_cpu.install(folder)
    socket.gethostname = lambda: "host"
    tokens, cpu = sum(SIZES), torch.device("cpu")
    assert rooms.obstacle(None, RANKS, cpu, torch.float16) is None
    assert rooms.make_room(None, RANKS, BATCH * RANKS * tokens * WIDTH * 2, cpu) is None
    alias = f"compile_overlap[1,2 r1 a2 b1 s0 peers]:{dist.group.WORLD.group_name}"
    weights = torch.randn((tokens, WIDTH, WIDTH), generator=torch.Generator().manual_seed(rank)).half()

    def layer(source):
        chunks = list(zip(range(len(SIZES)), (0, SIZES[0]), SIZES))
        puts = [peers.peer_put(source, index, first, size, RANKS, 0 if index else size, alias) for index, first, size in chunks]
        stored = []
        for index, first, size in chunks:
            rows = peers.peer_take(puts[index], source, index, first, size, RANKS, 0 if index else size, True, alias)
            part = weights[first : first + size]
            stored.append(
                peers.peer_gemm(rows.transpose(0, 1), part, None, gemm_combine.NO_BIAS, first, tokens, RANKS, alias)
            )
        return peers.peer_finish(stored, BATCH, tokens, WIDTH, RANKS, True, alias)

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, source):
            return layer(source)

        @staticmethod
        def backward(ctx, grad):
            return layer(grad.contiguous())

    source = torch.randn((BATCH, RANKS, tokens, WIDTH), generator=torch.Generator().manual_seed(10 + rank)).half()

    def call():
        leaf = source.clone().requires_grad_()
        output = Both.apply(leaf)
        output.backward(output.detach())
        return output.detach(), leaf.grad

    plain = call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiled = call()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graphs = [compiled(source)]
    with profile(activities=[ProfilerActivity.CPU]):
        graphs.append(compiled(source))
    from torch._dynamo.utils import counters

    named = [event.name for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]
    return {
        "equal": all(torch.equal(*pair) for pair in zip(plain, profiled))
        and all(torch.equal(plain[0], g) for g in graphs),
        "ranges": [name for name in named if ranges.is_ours(name)],
        "compiled": counters["stats"]["unique_graphs"],
    }


def test_ranges_name_the_exchanges_and_change_nothing(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    for found in run_on_ranks(functools.partial(_calls, folder=str(tmp_path)), RANKS, tmp_path, limit_s=200):
        assert found["equal"] and found["compiled"] == 1
        assert found["ranges"] == [
            "dispatch 0", "dispatch 1", "wait dispatch 0", "combine 0", "wait dispatch 1", "combine 1", "wait combine",
            "combine' 0", "combine' 1", "wait combine' 0", "dispatch' 0", "wait combine' 1", "dispatch' 1", "wait dispatch'",
        ]  # fmt: skip
