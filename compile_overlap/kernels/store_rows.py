"""Rows of a tensor stored straight into the inboxes of the ranks that they belong to, by one kernel.

    inbox of rank p: [rank*B + b, l, :] of the chunk's [P*B,length,D] = source[b, p, first+l, :],  l < stored

with source [B,P,L,D]; to the rank's own inbox all `length` tokens: copies within a device take multiprocessors, and would
start only when the GEMM ends that hides the other tokens' way to the peers.

For exchanges that nothing hides: while they run the multiprocessors have nothing else to do, and one launch takes the
place of a copy and a signal for each peer on a stream of its own, and of the wait for theirs: the last program that is
done tells the other ranks and waits for them (`meeting`). A piece of the source, its rows for one peer, lies together in
both places; the programs go round the peers, beginning with the next one.
"""

from __future__ import annotations

import functools

import torch

from . import sm_count
from .launch import Launch
from .meeting import Meeting

try:
    import triton
    import triton.language as tl

    from .meeting import tell, wait
except ImportError:
    triton = None

_BLOCK, _WARPS, _PER_SM = 2048, 4, 16


def store_rows(
    source: torch.Tensor, addresses: torch.Tensor, first: int, length: int, stored: int, rank: int, meeting: Meeting
) -> None:
    """Store the first `stored` of the chunk's tokens `first`..`first`+`length` of `source` [B,P,L,D], contiguous, of this
    rank's own rows all, and wait until all ranks of the meeting have done so.

    `addresses` [P], int64, on the device, of 16 bytes' alignment; nothing is stored for ranks whose address is 0. The
    inboxes hold chunks behind one another: this one begins P*B*first*D elements behind the address.
    """
    where = (first, length, stored, rank)
    run = _launch(source.shape, where, meeting.numbers, meeting.timed, source.dtype, source.device)
    run(source, addresses, meeting.flags, meeting.counts)


@functools.lru_cache(maxsize=1024)
def _launch(shape, where, meeting, timed, dtype, device) -> Launch:
    batch, P, tokens, width = shape
    first, length, stored, rank = where
    piece, begin = stored * width, first * width
    own_piece = length * width
    blocks = triton.cdiv(own_piece, _BLOCK)
    total = batch * P * blocks
    programs = min(total, _PER_SM * sm_count(device))
    numbers = batch, tokens * width, begin, piece, own_piece, P * batch * begin, blocks, rank, P, total, programs
    return Launch(_store_rows, (programs,), (*meeting, *numbers), TIMED=timed, BLOCK=_BLOCK, num_warps=_WARPS)


if triton is not None:

    @triton.jit
    def _store_rows(
        source, addresses, flags, counts, place, ranks, timeout,
        batch, row, begin, piece, own_piece, behind, blocks, rank, P, total, programs, TIMED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        for each in range(tl.program_id(0), total, programs):
            block, index = each % blocks, each // blocks
            peer = (rank + 1 + index % P) % P
            b = (index // P).to(tl.int64)
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < tl.where(peer == rank, own_piece, piece)
            value = tl.load(source + (b * P + peer) * row + begin + at, mask=inside)
            address = tl.load(addresses + peer)
            inbox = tl.multiple_of(address.to(tl.pointer_type(source.dtype.element_ty)), 16)
            tl.store(inbox + behind + (rank * batch + b) * own_piece + at, value, mask=inside & (address != 0))
        if tell(flags, counts, place, ranks, programs):
            wait(flags, counts, place, ranks, timeout, TIMED)
