"""The operators of the exchange through the peers' memory keep PyTorch's rules, and their fake kernels tell the truth."""

import peers_by_gloo
import pytest
import torch
from test_overlap_order import fake_ranks

from compile_overlap import compat, peers, rooms
from compile_overlap.kernels import gemm_combine

P, WIDTH, TOKENS, BATCH = 2, 16, 4, 3
ALIAS = "compile_overlap[4 r1 a2 b1 s0 peers]:0"


class _Kept(dict):
    """What was put stays, so that an operator can be called again."""

    def __contains__(self, key):
        return False

    def pop(self, key):
        return self[key]


class _OneChunk(list):
    """As if nothing but the first chunk had been stored since."""

    def __len__(self):
        return 1

    def __iter__(self):
        yield self[0]

    def clear(self):
        pass


@pytest.mark.parametrize("form", [gemm_combine.NO_BIAS, gemm_combine.ADD, gemm_combine.BADDBMM])
def test_opcheck(monkeypatch, form):
    monkeypatch.setattr(peers_by_gloo, "_exchange", torch.clone)
    monkeypatch.setattr(peers_by_gloo, "_sent", _Kept())
    monkeypatch.setattr(peers_by_gloo, "_stored", _OneChunk())
    source, weights = torch.randn(BATCH, P, TOKENS, WIDTH), torch.randn(TOKENS, WIDTH, WIDTH)
    bias = weights[:, 0] if form else None
    with fake_ranks(P):
        token = peers.peer_put(source, 0, 0, TOKENS, P, TOKENS, ALIAS)
        arrived = peers.peer_take(token, source, 0, 0, TOKENS, P, TOKENS, True, ALIAS)
        first = peers.peer_take_gemm(token, source, weights, 0, 0, TOKENS, P, 0, False, ALIAS)
        product = arrived.transpose(0, 1), weights, bias, form, 0, TOKENS, P, ALIAS
        stored = peers.peer_gemm(*product)
        torch.library.opcheck(peers.peer_put, (source, 0, 0, TOKENS, P, TOKENS, ALIAS))
        torch.library.opcheck(peers.peer_take, (token, source, 0, 0, TOKENS, P, TOKENS, True, ALIAS))
        torch.library.opcheck(peers.peer_take_gemm, (token, source, weights, 0, 0, TOKENS, P, 0, False, ALIAS))
        torch.library.opcheck(peers.peer_rows, (first, source, 0, TOKENS, P, True, ALIAS))
        torch.library.opcheck(peers.peer_gemm, product)
        torch.library.opcheck(peers.peer_finish, ([stored], BATCH, TOKENS, WIDTH, P, True, ALIAS))


def test_a_call_on_another_stream_follows_what_the_last_one_was_given(monkeypatch):
    waits = []

    class Stream:
        def __init__(self, handle):
            self.handle = handle

        def wait_stream(self, other):
            waits.append((self.handle, other.handle))

    room = rooms.Room.__new__(rooms.Room)
    room.stream = room.followed = None
    for stream in (0, 0, 7, 7, 0):  # 0: the default stream
        monkeypatch.setattr(compat, "current_raw_stream", lambda stream=stream: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: Stream(stream))
        room.follow()
    assert waits == [(7, 0), (0, 7)]
