"""The operators of `compile_overlap.peers` on CPU, by gloo collectives: what they mean, without anybody's memory.

Importing this registers them for CPU tensors, `install()` lets plans choose them; a rank's puts are exchanged when they
are taken. What is not kept is NaN from then on when the peers may write over it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from compile_overlap import operators, peers, transport  # noqa: F401  peers defines the operators
from compile_overlap.kernels import gemm_combine

_ON_CPU = torch.library.Library("compile_overlap", "IMPL")
_sent: dict[int, torch.Tensor] = {}
_arrived: dict[int, torch.Tensor] = {}
_stored: list[tuple[int, torch.Tensor]] = []
_lent: dict[str, list[torch.Tensor]] = {"inbox": [], "results": []}


def install() -> None:
    """Call it once in a process; what `transport` finds out about a group is replaced for good."""
    _sent.clear()
    _stored.clear()
    _take_back("inbox")
    _take_back("results")
    transport._obstacle = lambda *_: None
    transport._parts_agree = lambda *_: True
    for played in (_put, _take, _take_gemm, _rows, _gemm, _finish):
        setattr(operators.direct, f"peer{played.__name__}", played)


def _lend(buffer: str, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    _lent[buffer] += [] if keep else [tensor]
    return tensor


def _take_back(buffer: str) -> None:
    for tensor in _lent[buffer]:
        tensor.fill_(float("nan"))
    _lent[buffer].clear()


def _exchange(send: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received


@torch.library.impl(_ON_CPU, "peer_put", "CPU")
def _put(source, chunk, first, length, P, stored, alias):
    B, _, _, D = source.shape
    assert source.is_contiguous() and chunk not in _sent
    _take_back("results")
    _sent[chunk] = source[:, :, first : first + length].transpose(0, 1).reshape(P * B, length, D)
    return source.new_empty(0)


@torch.library.impl(_ON_CPU, "peer_take", "CPU")
def _take(token, source, chunk, first, length, P, stored, keep, alias):
    assert stored == (0 if chunk else length)
    return _lend("inbox", _exchange(_sent.pop(chunk)), keep)


@torch.library.impl(_ON_CPU, "peer_take_gemm", "CPU")
def _take_gemm(token, source, right, chunk, first, length, P, stored, triton, alias):
    assert chunk == 0 and 0 <= stored < length
    _arrived[first] = _exchange(_sent.pop(chunk))
    return torch.bmm(_arrived[first].transpose(0, 1), right)


@torch.library.impl(_ON_CPU, "peer_rows", "CPU")
def _rows(product, source, first, length, P, keep, alias):
    return _lend("inbox", _arrived[first].clone(), keep)


@torch.library.impl(_ON_CPU, "peer_gemm", "CPU")
def _gemm(left, right, bias, bias_form, first, tokens, P, alias):
    product = torch.bmm(left, right)
    if bias_form == gemm_combine.ADD:
        product = product + bias.unsqueeze(1)
    elif bias_form == gemm_combine.BADDBMM:
        product = torch.baddbmm(bias.unsqueeze(1).expand_as(product), left, right)
    _stored.append((first, product.transpose(0, 1).contiguous()))
    if sum(rows.shape[1] for _, rows in _stored) == tokens:
        _take_back("inbox")
    return left.new_empty(0)


@torch.library.impl(_ON_CPU, "peer_finish", "CPU")
def _finish(stored, batch, tokens, width, P, keep, alias):
    assert len(stored) == len(_stored)
    results = stored[0].new_empty((batch, P, tokens, width))
    for first, rows in _stored:
        arrived = _exchange(rows).view(P, batch, -1, width)
        results[:, :, first : first + rows.shape[1]] = arrived.transpose(0, 1)
    _stored.clear()
    return _lend("results", results, keep)
