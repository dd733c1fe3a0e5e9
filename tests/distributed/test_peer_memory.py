"""The exchange through the peers' memory as it runs on GPUs, between processes that map each other's buffers."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

WIDTH = 24


def _calls(rank, ranks, hosts, folder):
    import socket

    import symmetric_on_cpu

    from compile_overlap import peers, rooms
    from compile_overlap.kernels import gemm_combine

    assert os.environ["TRITON_INTERPRET"] == "1"
    symmetric_on_cpu.install(folder)
    socket.gethostname = lambda: f"host {hosts[rank]}"
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert rooms.obstacle(None, ranks, cpu, torch.float16) is None
    alias = f"compile_overlap[2 r1 a2 b1 s0 peers]:{group.group_name}"
    wrong = []
    for taken in (0, 2):
        _give_up(rank, ranks, taken, alias)
    cases = [
        (3, (4,), False, 4), (2, (1, 3), True, 1), (2, (4,), False, 0), (5, (2, 1, 1), False, 0), (1, (4,), True, 0),
        *(() if len(set(hosts)) > 1 else ((3, (4,), False, 1), (2, (3, 1), True, 2))),
    ]  # fmt: skip
    for call, (batch, sizes, keep, head) in enumerate(cases):
        tokens = sum(sizes)
        assert rooms.make_room(None, ranks, batch * ranks * tokens * WIDTH * 2, cpu) is None

        def draw(seed, *shape, call=call):
            return torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + seed)).half()

        inputs = [draw(each, batch, ranks, tokens, WIDTH) for each in range(ranks)]
        weights = [draw(10 + each, tokens, WIDTH, WIDTH) for each in range(ranks)]
        borders = [sum(sizes[:index]) for index in range(len(sizes))]
        chunks = list(enumerate(zip(borders, sizes)))
        source, at_once = inputs[rank], [0 if index else head for index, _ in chunks]
        puts = [peers.peer_put(source, index, *which, ranks, at_once[index], alias) for index, which in chunks]
        stored, arrived = [], []
        for index, (first, size) in chunks:
            part, which = weights[rank][first : first + size], (first, size, ranks)
            if index == 0 and head < size:
                product = peers.peer_take_gemm(puts[0], source, part, 0, *which, head, call % 2 == 0, alias)
                rows = peers.peer_rows(product, source, *which, keep, alias)
                expected = torch.bmm(rows.transpose(0, 1).float(), part.float()).half()
                wrong.append(not torch.allclose(product, expected, rtol=4e-3, atol=4e-2))
            else:
                rows = peers.peer_take(puts[index], source, index, *which, at_once[index], keep, alias)
            arrived.append(rows.clone())
            product = rows.transpose(0, 1), part, part[:, 0], gemm_combine.ADD, first, tokens, ranks, alias
            stored.append(peers.peer_gemm(*product))
        results = peers.peer_finish(stored, batch, tokens, WIDTH, ranks, call % 2 == 0, alias)
        expected_rows = torch.cat([each[:, rank] for each in inputs])
        wrong.append(not torch.equal(torch.cat(arrived, 1), expected_rows))
        for owner in range(ranks):
            rows = inputs[rank][:, owner].transpose(0, 1)
            expected = torch.bmm(rows.float(), weights[owner].float()).half() + weights[owner][:, :1]
            wrong.append(not torch.allclose(results[:, owner].transpose(0, 1), expected, rtol=4e-3, atol=4e-2))
        rooms.room(alias).results.fill_(255)  # what no rank stores again stays NaN
    return wrong


def _give_up(rank, ranks, taken, alias):
    """A call that raises on all ranks alike before it is done, with so many of its two chunks taken: no memory, say."""
    from compile_overlap import peers, rooms
    from compile_overlap.kernels import gemm_combine

    batch, chunks = 2, ((0, 1), (1, 3))
    with torch.inference_mode():
        assert rooms.make_room(None, ranks, batch * ranks * 4 * WIDTH * 2, torch.device("cpu")) is None
        room = rooms.room(alias)
        part = room.part("inbox", torch.half, 0, (1,))
    assert not (room.inbox_addresses.is_inference() or part.is_inference())  # later calls could not write to them
    source, part = torch.full((batch, ranks, 4, WIDTH), 7.0).half(), torch.ones(4, WIDTH, WIDTH).half()
    at_once = (1, 0)
    puts = [peers.peer_put(source, index, *which, ranks, at_once[index], alias) for index, which in enumerate(chunks)]
    for index, (first, size) in enumerate(chunks[:taken]):
        rows = peers.peer_take(puts[index], source, index, first, size, ranks, at_once[index], False, alias)
        right = part[first : first + size]
        peers.peer_gemm(rows.transpose(0, 1), right, right[:, 0], gemm_combine.ADD, first, 4, ranks, alias)


@pytest.mark.parametrize("hosts", ["aa", "abab", *(pytest.param(each, marks=pytest.mark.slow) for each in ("aaa", "aabb"))])
def test_rows_reach_their_owners_and_come_back(hosts, monkeypatch, tmp_path):
    """Each rank's host is a letter; between hosts rows travel by collectives. Two calls before have come to nothing."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    job = functools.partial(_calls, ranks=len(hosts), hosts=hosts, folder=str(tmp_path))
    for wrong in run_on_ranks(job, len(hosts), tmp_path, limit_s=200):
        assert not any(wrong)


def _alone(rank):
    import socket

    import symmetric_on_cpu

    from compile_overlap import rooms

    symmetric_on_cpu.install("unused")
    socket.gethostname = lambda: f"host {'aab'[rank]}"
    return rooms.obstacle(None, 3, torch.device("cpu"), torch.float16)


def test_a_rank_alone_on_its_host_keeps_the_group_from_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reasons = run_on_ranks(_alone, 3, tmp_path)
    assert reasons == ["another rank cannot"] * 2 + ["a rank is alone on its host"]
