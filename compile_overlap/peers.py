"""Exchanges between GPUs that see each other's memory: no collective, no pack, no unpack, few launches.

Every rank of a group keeps two symmetric buffers (`rooms.Room`): an inbox, into which its peers put the rows that they
dispatch, and its results, into which their GEMMs store the rows that they combine (`kernels.gemm_combine`).

    peer_put      my tokens of a chunk, straight from [B,T,D] into each inbox [P*B,l,D]
    peer_take     the rows of all peers, when they are there
    peer_take_gemm  the first GEMM, of the first tokens while the others travel; or of my own rows while the peers'
                  travel, in a group of several hosts of my host's rows while the other hosts' travel
    peer_rows     the rows that it waited for
    peer_gemm     the second GEMM, stored into everybody's results
    peer_finish   waits until everybody has stored; my results, or a private copy of them

Rows that nothing hides are stored by a kernel on the stream of the computation, in which all ranks wait for each other
(`kernels.store_rows`): those of a first chunk, or of its first tokens (`Plan.head`), whose GEMM hides the others. Others
are put by copy engines beside the computation, which keeps its SMs, with a signal to each owner: those of later chunks, of a first
chunk's other tokens, and all of a first chunk's where its first GEMM begins with the rows that are nearest
(`Plan.own_first`). Rows for ranks on other hosts, and from them, travel by the group's collectives meanwhile.

When a buffer may be written again, for calls of a layer one after the other on all ranks:

- My inbox is read between the wait for a chunk and the call's last `peer_gemm`, which tells the others when it is done. A
  peer's next `peer_put` follows its `peer_finish`, which waits for that.
- My results are read by the copy in `peer_finish`, or, if a graph has read them when it ends, by that graph. A peer
  stores into them again only in a GEMM that waited for my next `peer_put`, which follows: on the same stream, or on
  another one that waits for all that the call before has issued (`Room.stream`). A captured CUDA graph cannot wait for
  what ran before its capture: replay it on the stream that makes the other calls.

A call that raises on all ranks alike (no memory, say) may leave signals and rows under way: the next one receives them first.

So one inbox and one buffer of results serve any number of layers and streams; what a caller gets is its own copy. Signals are
flags on the device that each wait resets, or counts (`kernels.meeting`), so that eager calls and replays of a CUDA graph
can follow one another. A wait never waits for something that is issued after it, on any rank: put -> take -> GEMM ->
finish is the order on each. A wait that lasts longer than the group's timeout ends the process's use of its GPU: its next
CUDA call raises, which `faults` explains where it can.

Operators carry the layer's alias of its group (`passes.graphs`), by which they find the room.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Callable, Sequence

import torch

from . import ranges
from .kernels import chunk_gemm_triton, gemm_combine, loaded_library
from .kernels.collect import collect, wait_for_all
from .kernels.store_rows import store_rows
from .operators import fake_of, operator
from .rooms import Room, room

_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


@functools.lru_cache(maxsize=None)
def _memcpy_2d() -> Callable[..., int]:
    copy = loaded_library("libcudart.so").cudaMemcpy2DAsync
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    copy.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    return copy


def _copy_rows(to: int, source: int, width: int, to_pitch: int, pitch: int, rows: int, stream: torch.cuda.Stream) -> None:
    """Copy `rows` pieces of `width` bytes, `pitch` bytes apart, to places `to_pitch` bytes apart; by a copy engine."""
    status = _memcpy_2d()(to, to_pitch, source, pitch, width, rows, _DEVICE_TO_DEVICE, stream.cuda_stream)
    if status:
        raise RuntimeError(f"cudaMemcpy2DAsync failed with status {status}")


@operator
def peer_put(
    source: torch.Tensor, chunk: int, first: int, length: int, P: int, stored: int, alias: str
) -> torch.Tensor:
    """Put tokens `first`..`first`+`length` of each rank's share of `source` [B,P,L,D] into that rank's inbox.

    A kernel stores the first `stored` of them, and my own rows. The others go by copy engines, beside the computation: at
    once where none are stored, else when `peer_take_gemm` has launched what hides them. Chunks are put in their order,
    beginning with 0. The result holds nothing; what takes the same chunk needs it and `source`, which keeps both alive until then.
    """
    here = room(alias)
    if chunk == 0 and not torch.cuda.is_current_stream_capturing():  # while capturing nothing is sent
        here.follow()
        _finish_given_up(here, source)
    if here.away is not None:
        here.away.start(("in", chunk), source[:, here.away.index, first : first + length])
    if stored:
        store_rows(source, here.inbox_addresses, first, length, stored, here.rank, here.inbox_meeting)
    else:
        here.sending.wait_stream(torch.cuda.current_stream(source.device))
        _send(here, source, chunk, first, length, 0)
    return _nothing(source.dtype, source.device)


@ranges.named
def _send(here: Room, source: torch.Tensor, chunk: int, first: int, length: int, begin: int) -> None:
    """Put a chunk's tokens from its `begin`-th on by copy engines, on a stream of their own, and signal to their owners.

    My own rows too, unless the kernel that stored the first tokens has stored them.
    """
    batch, P, tokens, width = source.shape
    size = source.element_size() * width
    piece, pitch = length * size, P * tokens * size
    with torch.cuda.stream(here.sending):
        for peer, place in (*here.others, *(() if begin else ((here.rank, None),))):
            to = here.inboxes[peer] + (P * first * size + here.rank * piece) * batch + begin * size
            at = source.data_ptr() + (peer * tokens + first + begin) * size
            _copy_rows(to, at, (length - begin) * size, piece, pitch, batch, here.sending)
            if place is not None:
                here.inbox_handle.put_signal(place, channel=chunk, timeout_ms=here.timeout_ms)
    here.sent.setdefault(chunk, torch.cuda.Event()).record(here.sending)
    if not torch.cuda.is_current_stream_capturing():
        here.under_way.add(chunk)


@functools.lru_cache(maxsize=None)
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What an operator returns that only later ones depend on."""
    return torch.empty(0, dtype=dtype, device=device)


@fake_of(peer_put)
def _(source, chunk, first, length, P, stored, alias):
    return source.new_empty(0)


def _finish_given_up(here: Room, source: torch.Tensor) -> None:
    """Receive what a call that raised on all ranks alike has left under way: a next one would take it for its own."""
    for chunk in sorted(here.under_way):
        _wait_for_signals(here, source, chunk)
    for key in list(here.away.travelling) if here.away else ():
        here.away.wait(key)


def _wait_for_signals(here: Room, source: torch.Tensor, chunk: int) -> None:
    """Until the rows that the copy engines of this host's ranks put lie in my inbox."""
    torch.cuda.current_stream(source.device).wait_event(here.sent[chunk])
    for _, place in here.others:
        here.inbox_handle.wait_signal(place, channel=chunk, timeout_ms=here.timeout_ms)
    here.under_way.discard(chunk)


def _take_away(here: Room, chunk: int, rows: torch.Tensor) -> None:
    """Wait for the rows of other hosts' ranks, if there are any, and lay them into my inbox."""
    if here.away is not None:
        rows.unflatten(0, (here.size, -1)).index_copy_(0, here.away.index, here.away.wait(("in", chunk)))


def _rows(here: Room, source: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """Where a chunk's rows lie in my inbox: [P*B,l,D]."""
    batch, P, _, width = source.shape
    return here.part("inbox", source.dtype, P * batch * first * width, (P * batch, length, width))


@operator
def peer_take(
    token: torch.Tensor, source: torch.Tensor, chunk: int, first: int, length: int, P: int, stored: int, keep: bool,
    alias: str,
) -> torch.Tensor:  # fmt: skip
    """Wait for a chunk's rows of all peers: [P*B,length,D], block p from rank p; all or none of them `stored`, as they were put.

    Stored rows have been waited for by the kernel that stores. A private copy with `keep`; otherwise the inbox itself, to
    be read before the call's last `peer_gemm` and never written.
    """
    here = room(alias)
    rows = _rows(here, source, first, length)
    if not stored:
        _wait_for_signals(here, source, chunk)
    _take_away(here, chunk, rows)
    return rows.clone() if keep else rows


@fake_of(peer_take)
def _(token, source, chunk, first, length, P, stored, keep, alias):
    return source.new_empty((P * source.shape[0], length, source.shape[3]))


@operator
def peer_take_gemm(
    token: torch.Tensor, source: torch.Tensor, right: torch.Tensor, chunk: int, first: int, length: int, P: int,
    stored: int, triton: bool, alias: str,
) -> torch.Tensor:  # fmt: skip
    """`bmm` of a chunk's rows of all ranks and `right` [l,D,N]: [l,P*B,N]; by our kernel with `triton`, else by cuBLAS.

    In parts, each multiplied when it has arrived: the `stored` tokens and the others, or, where none were stored, the
    nearest rows and the others.
    """
    here = room(alias)
    batch = source.shape[0]
    product = source.new_empty((length, P * batch, right.shape[2]))
    rows = _rows(here, source, first, length)
    if stored:
        here.sending.wait_stream(torch.cuda.current_stream(source.device))
        multiply_into(product[:stored], rows[:, :stored], right[:stored], triton)
        _send(here, source, chunk, first, length, stored)
        _wait_for_signals(here, source, chunk)
        multiply_into(product[stored:], rows[:, stored:], right[stored:], triton)
        return product
    near, far = parts_of(here.rank, here.domain, batch, P)
    if here.away is None:
        multiply_into(product[:, near[0]], source[:, here.rank, first : first + length], right, triton)
        _wait_for_signals(here, source, chunk)
    else:
        _wait_for_signals(here, source, chunk)
        for block in near:
            multiply_into(product[:, block], rows[block], right, triton)
        _take_away(here, chunk, rows)
    for block in far:
        multiply_into(product[:, block], rows[block], right, triton)
    return product


@fake_of(peer_take_gemm)
def _(token, source, right, chunk, first, length, P, stored, triton, alias):
    return source.new_empty((length, P * source.shape[0], right.shape[2]))


def parts_of(rank: int, domain: tuple[int, ...], batch: int, P: int) -> tuple[list[slice], list[slice]]:
    """Rows of P*B that a first GEMM begins with, and the others, in as few blocks as can be.

    A rank's own rows, or, in a group of several hosts, those of its host, `domain`: the link between hosts is the slow one.
    """
    first = domain if len(domain) < P else (rank,)
    near, far = [], []
    for each in range(P):
        part = near if each in first else far
        if part and part[-1].stop == each * batch:
            part[-1] = slice(part[-1].start, (each + 1) * batch)
        else:
            part.append(slice(each * batch, (each + 1) * batch))
    return near, far


def multiply_into(product: torch.Tensor, rows: torch.Tensor, right: torch.Tensor, triton: bool) -> None:
    """`product` [l,n,N], a part of a larger one, = `rows` [n,l,D] @ `right` [l,D,N]."""
    multiply = chunk_gemm_triton.bmm_into if triton else torch.bmm
    multiply(rows.transpose(0, 1), right, out=product)


def parts_agree(
    length: int, head: int, batch: int, P: int, rank: int, domain: tuple[int, ...], inner: int, columns: int,
    transposed: bool, triton: bool, dtype: torch.dtype, device: torch.device,
) -> bool:  # fmt: skip
    """Whether `peer_take_gemm`'s parts equal the product of all rows at once, on random operands of these shapes.

    The parts are the first `head` tokens and the others, or with 0 the nearest rows and the others.
    """
    draw = functools.partial(torch.randn, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
    rows, source = draw((P * batch, length, inner)), draw((batch, P, length, inner))
    right = draw((length, columns, inner)).transpose(1, 2) if transposed else draw((length, inner, columns))
    product = rows.new_empty((length, P * batch, columns))
    if head:
        for part in (slice(head), slice(head, length)):
            multiply_into(product[part], rows[:, part], right[part], triton)
    else:
        near, far = parts_of(rank, domain, batch, P)
        own = slice(rank * batch, (rank + 1) * batch)
        rows[own] = source[:, rank]
        for block in (*near, *far):
            multiply_into(product[:, block], source[:, rank] if block == own else rows[block], right, triton)
    return torch.equal(product, chunk_gemm_triton.product(rows.transpose(0, 1), right, triton))


@operator
def peer_rows(
    product: torch.Tensor, source: torch.Tensor, first: int, length: int, P: int, keep: bool, alias: str
) -> torch.Tensor:
    """A chunk's rows of all ranks [P*B,length,D], after `peer_take_gemm` has multiplied them; `keep` as `peer_take`'s."""
    rows = _rows(room(alias), source, first, length)
    return rows.clone() if keep else rows


@fake_of(peer_rows)
def _(product, source, first, length, P, keep, alias):
    return source.new_empty((P * source.shape[0], length, source.shape[3]))


@operator
def peer_gemm(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    bias_form: int,
    first: int,
    tokens: int,
    P: int,
    alias: str,
) -> torch.Tensor:
    """left [l,P*B,K] @ right [l,K,D] (+ bias [l,D]) into rank p's results [B,P*tokens,D], at rows rank*tokens + first.

    The result holds nothing; `peer_finish` needs it.
    """
    here = room(alias)
    batch, width = left.shape[1] // P, right.shape[2]
    addresses = here.result_addresses(tokens * width * left.element_size())
    row = here.rank * tokens + first
    gemm_combine.gemm_combine(
        left, right, bias, addresses, batch, P * tokens, row, bias_form, here.results_meeting
    )  # fmt: skip
    if here.away is not None:
        rows = here.part("outbox", left.dtype, 0, (batch, P, tokens, width))
        here.away.start(("out", first), rows[:, here.away.index, first : first + left.shape[0]])
    return _nothing(left.dtype, left.device)


@fake_of(peer_gemm)
def _(left, right, bias, bias_form, first, tokens, P, alias):
    return left.new_empty(0)


@operator
def peer_finish(
    stored: Sequence[torch.Tensor], batch: int, tokens: int, width: int, P: int, keep: bool, alias: str
) -> torch.Tensor:  # fmt: skip
    """Wait until all ranks have stored all their chunks; my results [B,P,L,D].

    A private copy with `keep`; otherwise the buffer itself, to be read before the next call's first `peer_put` and never
    written.
    """
    here = room(alias)
    results = here.part("results", stored[0].dtype, 0, (batch, P, tokens, width))
    if keep:
        results = collect(results, here.results_meeting)
    else:
        wait_for_all(here.results_meeting)
    for key in [key for key in here.away.travelling if key[0] == "out"] if here.away else ():
        rows = here.away.wait(key)
        results[:, here.away.index, key[1] : key[1] + rows.shape[2]] = rows.transpose(0, 1)
    return results


@fake_of(peer_finish)
def _(stored, batch, tokens, width, P, keep, alias):
    return stored[0].new_empty((batch, P, tokens, width))


@functools.lru_cache(maxsize=None)
def register_lowering() -> None:
    """Tell Inductor that the symmetric buffers are not memory of its own, which it could use again for something else."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    from .peer_layer import peer_layer

    for taking in (peer_take, peer_rows, peer_finish, peer_layer):
        _register(taking, lowering, V)


def _register(taking, lowering, V) -> None:
    call = lowering.fallback_handler(taking, add_to_fallback_set=False)
    keep = [argument.name for argument in taking._schema.arguments].index("keep")

    @lowering.register_lowering(taking, type_promotion_kind=None)
    def take(*args):
        arrived = call(*args)
        if not args[keep]:
            V.graph.never_reuse_buffers.add(arrived.get_name())
        return arrived
