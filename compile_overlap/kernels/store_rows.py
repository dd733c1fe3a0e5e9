"""Rows of a tensor stored straight into the inboxes of the ranks that they belong to, by one kernel.

    inbox of rank p: [rank*B + b, l, :] of the chunk's [P*B,length,D] = source[b, p, first+l, :],  l < stored

with source [B,P,L,D].

For exchanges that nothing hides: while they run the multiprocessors have nothing else to do, and one launch takes the
place of a copy and a signal for each peer on a stream of its own. A piece of the source, its rows for one peer, lies
together in both places; the programs go round the peers, beginning with the next one.
"""

from __future__ import annotations

import functools

import torch

from .launch import Launch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK, _WARPS = 2048, 4


def store_rows(source: torch.Tensor, addresses: torch.Tensor, first: int, length: int, stored: int, rank: int) -> None:
    """Store the first `stored` of the chunk's tokens `first`..`first`+`length` of `source` [B,P,L,D], contiguous.

    `addresses` [P], int64, on the device, of 16 bytes' alignment; nothing is stored for ranks whose address is 0. The
    inboxes hold chunks behind one another: this one begins P*B*first*D elements behind the address.
    """
    _launch(source.shape, first, length, stored, rank, source.dtype, source.device)(source, addresses)


@functools.lru_cache(maxsize=1024)
def _launch(shape, first, length, stored, rank, dtype, device) -> Launch:
    batch, P, tokens, width = shape
    piece, begin = stored * width, first * width
    blocks = triton.cdiv(piece, _BLOCK)
    numbers = batch, tokens * width, begin, piece, length * width, P * batch * begin, blocks, rank, P
    return Launch(_store_rows, (batch * P * blocks,), numbers, BLOCK=_BLOCK, num_warps=_WARPS)


if triton is not None:

    @triton.jit
    def _store_rows(
        source, addresses, batch, row, begin, piece, pitch, behind, blocks, rank, P, BLOCK: tl.constexpr
    ):  # fmt: skip
        block = tl.program_id(0) % blocks
        index = tl.program_id(0) // blocks
        peer = (rank + 1 + index % P) % P
        b = (index // P).to(tl.int64)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < piece
        value = tl.load(source + (b * P + peer) * row + begin + at, mask=inside)
        address = tl.load(addresses + peer)
        inbox = tl.multiple_of(address.to(tl.pointer_type(source.dtype.element_ty)), 16)
        tl.store(inbox + behind + (rank * batch + b) * pitch + at, value, mask=inside & (address != 0))
