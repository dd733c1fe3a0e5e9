"""The peers' operators on GPUs: rows arrive where they belong, also when ranks run late and buffers are full of junk.

Ranks have a GPU each, with NCCL, or share GPUs, with gloo, where the torch version allows it (2.11).
"""

import functools
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from compile_overlap import peers, rooms
from compile_overlap.kernels import gemm_combine

GPUS = torch.cuda.device_count()
SHARING = GPUS > 0 and not torch.__version__.startswith(("2.6.", "2.7."))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2 and not SHARING, reason="needs two CUDA devices")]

P, WIDTH = 2, 64
SHARED = GPUS < P
ALIAS = "compile_overlap[2,2 r1 a2 b1 s0 peers]:{}"


def start(rank, ranks, folder):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    backend = {"backend": "gloo"} if ranks > GPUS else {"backend": "nccl", "device_id": device}
    dist.init_process_group(**backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def _draw(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def _stress(rank, calls):
    group = dist.group.WORLD
    rooms.make_room(group, P, 1 << 20, torch.device("cuda", torch.cuda.current_device()))
    alias = ALIAS.format(group.group_name)
    here = rooms.room(alias)
    mismatches = 0
    for call in range(calls):
        choice = torch.Generator().manual_seed(call)  # the same on both ranks
        batch = int(torch.randint(1, 40, (), generator=choice))
        sizes = [(4,), (2, 2), (1, 3), (2, 1, 1)][int(torch.randint(4, (), generator=choice))]
        tokens, (keep, copied) = sum(sizes), torch.randint(2, (2,), generator=choice).bool().tolist()
        # All of a first chunk are stored, none (its GEMM begins with a rank's own rows), or some.
        head = int(torch.randint(sizes[0] + 1, (), generator=choice))
        stored_of = [head, *[0] * (len(sizes) - 1)]
        weights = [_draw(1000 + call * P + r, tokens, WIDTH, WIDTH) for r in range(P)]
        inputs = [_draw(9000 + call * P + r, batch, P, tokens, WIDTH) for r in range(P)]
        if torch.rand((), generator=torch.Generator().manual_seed(call * P + rank)) < 0.3:
            torch.cuda._sleep(int(2e6))  # this rank is late
        source, stored, first = inputs[rank], [], 0
        puts = []
        for index, size in enumerate(sizes):
            puts.append(peers.peer_put(source, index, first, size, P, stored_of[index], alias))
            first += size
        first = 0
        for index, size in enumerate(sizes):
            part, which = weights[rank][first : first + size], (first, size, P)
            if index == 0 and head < size:
                left = peers.peer_take_gemm(puts[0], source, part, 0, *which, head, False, alias)
                arrived = peers.peer_rows(left, source, *which, keep, alias)
                mismatches += not torch.equal(left, torch.bmm(arrived.transpose(0, 1), part))
            else:
                arrived = peers.peer_take(puts[index], source, index, *which, stored_of[index], keep, alias)
                left = torch.bmm(arrived.transpose(0, 1), part)
            stored.append(peers.peer_gemm(left, part, part[:, 0], gemm_combine.ADD, first, tokens, P, alias))
            first += size
        results = peers.peer_finish(stored, batch, tokens, WIDTH, P, copied, alias)
        for owner in range(P):
            rows = inputs[rank][:, owner].transpose(0, 1)
            expected = torch.bmm(torch.bmm(rows, weights[owner]), weights[owner]) + weights[owner][:, :1]
            mismatches += not torch.allclose(results[:, owner].transpose(0, 1), expected, rtol=0.05, atol=2.0)
        here.results.fill_(255)  # what no rank stores again stays NaN
    return mismatches


@pytest.mark.parametrize("calls", [40 if SHARED else 500, pytest.param(2000, marks=pytest.mark.slow)])
def test_rows_arrive_under_delays(calls, tmp_path):
    assert run_on_ranks(functools.partial(_stress, calls=calls), P, tmp_path, start=start) == [0, 0]


def _opchecks(rank):
    """In step on all ranks. A first chunk only: a signal that is raised twice waits until it has been taken."""
    group = dist.group.WORLD
    rooms.make_room(group, P, 1 << 20, torch.device("cuda", torch.cuda.current_device()))
    alias = ALIAS.format(group.group_name)
    source, weights = _draw(rank, 3, P, 4, WIDTH), _draw(9, 4, WIDTH, WIDTH)
    token = peers.peer_put(source, 0, 0, 4, P, 4, alias)
    arrived = peers.peer_take(token, source, 0, 0, 4, P, 4, True, alias)
    stored = peers.peer_gemm(arrived.transpose(0, 1), weights, weights[:, 0], gemm_combine.ADD, 0, 4, P, alias)
    torch.library.opcheck(peers.peer_put, (source, 0, 0, 4, P, 4, alias))
    torch.library.opcheck(peers.peer_take, (token, source, 0, 0, 4, P, 4, True, alias))
    torch.library.opcheck(peers.peer_rows, (arrived, source, 0, 4, P, True, alias))
    arguments = (arrived.transpose(0, 1), weights, weights[:, 0], gemm_combine.ADD, 0, 4, P, alias)
    torch.library.opcheck(peers.peer_gemm, arguments)
    torch.library.opcheck(peers.peer_finish, ([stored], 3, 4, WIDTH, P, True, alias))
    return True


def test_operators_keep_the_rules(tmp_path):
    assert run_on_ranks(_opchecks, P, tmp_path, start=start) == [True, True]


def _late(rank, folder):
    """Rank 0 puts rows and waits; rank 1 does not come."""
    group = dist.group.WORLD
    rooms.make_room(group, P, 1 << 20, torch.device("cuda", torch.cuda.current_device()))
    alias = ALIAS.format(group.group_name)
    here, error = rooms.room(alias), None
    here.inbox_meeting = replace(here.inbox_meeting, timeout_ms=2000)
    if rank == 0:
        try:
            peers.peer_put(_draw(rank, 3, P, 4, WIDTH), 0, 0, 4, P, 4, alias)
            torch.cuda.synchronize()
        except RuntimeError as problem:  # torch.AcceleratorError from 2.8 on
            error = str(problem)
    time.sleep(0 if rank == 0 else 6)  # its end would end the other one's store
    torch.save(error, f"{folder}/{rank}.pt")
    os._exit(0)  # the device is of no use any more


def test_a_wait_that_lasts_too_long_ends_the_use_of_the_device(tmp_path):
    error, _ = run_on_ranks(functools.partial(_late, folder=str(tmp_path)), P, tmp_path, start=start)
    assert "CUDA error" in error
