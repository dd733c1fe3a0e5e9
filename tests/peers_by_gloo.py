"""The operators of `compile_overlap.peers` on CPU, by gloo collectives: what they mean, without anybody's memory.

`install()` registers them for CPU tensors and lets plans choose them; a rank's puts are exchanged when they are taken.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from compile_overlap import peers, transport
from compile_overlap.kernels import gemm_combine

_sent: dict[int, torch.Tensor] = {}
_stored: list[tuple[int, torch.Tensor]] = []


def install() -> None:
    """Call it once in a process; `transport._obstacle` and `peers.make_room` are replaced for good."""
    _sent.clear()
    _stored.clear()
    transport._obstacle = lambda *_: None
    peers.make_room = lambda *_: None
    peers.peer_put.register_kernel("cpu")(_put)
    peers.peer_take.register_kernel("cpu")(_take)
    peers.peer_gemm.register_kernel("cpu")(_gemm)
    peers.peer_finish.register_kernel("cpu")(_finish)


def _exchange(send: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received


def _put(source, chunk, first, length, P, alias):
    B, _, _, D = source.shape
    assert source.is_contiguous() and chunk not in _sent
    _sent[chunk] = source[:, :, first : first + length].transpose(0, 1).reshape(P * B, length, D)
    return source.new_empty(0)


def _take(token, source, chunk, first, length, P, keep, alias):
    return _exchange(_sent.pop(chunk))


def _gemm(left, right, bias, bias_form, first, tokens, P, alias):
    product = torch.bmm(left, right)
    if bias_form == gemm_combine.ADD:
        product = product + bias.unsqueeze(1)
    elif bias_form == gemm_combine.BADDBMM:
        product = torch.baddbmm(bias.unsqueeze(1).expand_as(product), left, right)
    _stored.append((first, product.transpose(0, 1).contiguous()))
    return left.new_empty(0)


def _finish(stored, batch, tokens, width, P, alias):
    assert len(stored) == len(_stored)
    results = stored[0].new_empty((batch, P, tokens, width))
    for first, rows in _stored:
        arrived = _exchange(rows).view(P, batch, -1, width)
        results[:, :, first : first + rows.shape[1]] = arrived.transpose(0, 1)
    _stored.clear()
    return results
