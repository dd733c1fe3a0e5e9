"""One rank that cannot make symmetric buffers: all ranks learn it, and none waits for long."""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from compile_overlap import compat, rooms

CPU = torch.device("cpu")


def _fails_on_last(where, rank):
    """Both steps without CUDA: `rendezvous` waits for the other rank at the group's store, as the real one does."""
    last = rank == dist.get_world_size() - 1

    def allocate(nbytes, device):
        if where == "allocate" and last:
            raise torch.OutOfMemoryError("no memory left")
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(buffer, name):
        assert name == dist.group.WORLD.group_name
        if where == "rendezvous" and last:
            raise RuntimeError("handles cannot be exported")
        store = compat.symmetric_memory_store(dist.group.WORLD)
        store.set(f"here {rank}", "")
        for other in range(dist.get_world_size()):
            store.get(f"here {other}")

    rooms._allocate, rooms.symmetric_memory.rendezvous, rooms.RENDEZVOUS_S = allocate, rendezvous, 2
    store = compat.symmetric_memory_store(dist.group.WORLD)
    before, begin = store.timeout, time.monotonic()
    reason = rooms.make_room(None, dist.get_world_size(), 1 << 20, CPU)
    return reason, time.monotonic() - begin, store.timeout == before, rooms._ROOMS[dist.group.WORLD.group_name][1]


@pytest.mark.parametrize("where, cause", [("allocate", "no memory left"), ("rendezvous", "handles cannot be exported")])
def test_a_rank_that_fails_strands_no_other(where, cause, tmp_path):
    results = run_on_ranks(functools.partial(_fails_on_last, where), 3, tmp_path)
    for rank, (reason, seconds, restored, made) in enumerate(results):
        assert reason.startswith("no symmetric memory of 1048576 bytes")
        assert (cause in reason) == (rank == 2)
        assert seconds < 30 and restored and made == []
