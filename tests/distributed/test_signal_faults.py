"""A peer whose signal does not come is named, as one that comes to no exchange is."""

import functools

import torch
import torch.distributed as dist
from test_faults import OTHER, RANKS, _error, _on_ranks, _stop

from compile_overlap import faults


def _silent_peer(folder, rank):
    """Rows travel through the peers' memory, and one rank sends none."""
    import symmetric_on_cpu

    from compile_overlap import peers, rooms

    symmetric_on_cpu.install(folder)
    assert rooms.make_room(None, RANKS, 1 << 20, torch.device("cpu")) is None
    alias = f"compile_overlap[2 r1 a2 b1 s0 peers]:{dist.group.WORLD.group_name}"
    source = torch.ones(2, RANKS, 2, 8).half()

    def step():
        with faults.watched():
            if rank == OTHER:
                _stop()
            token = peers.peer_put(source, 0, 0, 2, RANKS, 0, alias)
            peers.peer_take(token, source, 0, 0, 2, RANKS, 0, False, alias)

    return _error(step)


def test_a_peer_whose_signal_does_not_come_is_named(tmp_path):
    results = _on_ranks(functools.partial(_silent_peer, str(tmp_path)), tmp_path, [0, 2])
    for text in results:
        assert text.startswith("RankFault: rank 1 died or stalled") and "CUDA error" in text, text
