"""Symmetric memory between processes on CPU: files that every rank maps, with flags that ranks raise for each other.

`install(folder)` puts it under `compile_overlap.rooms` and `peers`, whose code then runs as on GPUs: real addresses of other ranks'
buffers, kernels by Triton's interpreter (`TRITON_INTERPRET=1` before Triton is imported), copies by memmove, streams that
run everything at once. `aten_kernels()` puts ATen's GEMM, which rounds as the reference's does, in the place of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from pathlib import Path

import torch
import torch.distributed as dist

from compile_overlap import compat, peers, rooms
from compile_overlap.kernels import chunk_gemm_triton, gemm_combine, store_rows

CHANNELS, MOST_RANKS = 16, 16
FLAGS = CHANNELS * MOST_RANKS


class Handle:
    """What `rendezvous` returns: the ranks' buffers by address, and their flags behind them."""

    def __init__(self, maps, rank, nbytes):
        self.maps, self.rank, self.world_size, self.nbytes = maps, rank, len(maps), nbytes
        self.buffer_ptrs = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]

    def _flip(self, owner, channel, source, to, timeout_ms):
        """Wait until the flag is not `to`, then make it `to`. Raises what the next CUDA call does after a trap."""
        at = self.nbytes + channel * MOST_RANKS + source
        begin = time.monotonic()
        while self.maps[owner][at] == to:
            if timeout_ms and time.monotonic() - begin > timeout_ms / 1000:
                waiting = f"to rank {owner}" if to else f"from rank {source}"
                print(f"[FATAL] rank {self.rank}: no signal {waiting} on channel {channel}", flush=True)
                raise RuntimeError("CUDA error: unspecified launch failure")
            time.sleep(1e-4)
        self.maps[owner][at] = to

    def put_signal(self, dst_rank, channel=0, timeout_ms=0):
        self._flip(dst_rank, channel, self.rank, 1, timeout_ms)

    def wait_signal(self, src_rank, channel=0, timeout_ms=0):
        self._flip(self.rank, channel, src_rank, 0, timeout_ms)


class _Files:
    def __init__(self, folder):
        self.folder, self.count, self.own = Path(folder), 0, {}

    def empty(self, nbytes, dtype, device):
        path = self.folder / f"symmetric-{self.count}-{dist.get_rank()}"
        self.count += 1
        path.write_bytes(bytes(nbytes + FLAGS))
        buffer = torch.frombuffer(self._map(path), dtype=torch.uint8, count=nbytes)
        self.own[buffer.data_ptr()] = path
        return buffer

    def rendezvous(self, buffer, name):
        group = torch._C._distributed_c10d._resolve_process_group(name)
        path, ranks = self.own[buffer.data_ptr()], dist.get_process_group_ranks(group)
        dist.barrier(group=group)
        paths = [path.with_name(path.name.rsplit("-", 1)[0] + f"-{rank}") for rank in ranks]
        return Handle([self._map(each) for each in paths], dist.get_rank(group), buffer.numel())

    @staticmethod
    def _map(path):
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)


class _Now:
    """A stream or an event where everything has happened already."""

    cuda_stream = 0

    def __init__(self, *_):
        pass

    def wait_stream(self, stream):
        pass

    wait_event = record = wait_stream


def _memcpy_2d(to, to_pitch, source, pitch, width, rows, kind, stream):
    for row in range(rows):
        ctypes.memmove(to + row * to_pitch, source + row * pitch, width)
    return 0


def install(folder) -> None:
    """For good, in this process."""
    files = _Files(folder)
    rooms.symmetric_memory.empty, rooms.symmetric_memory.rendezvous = files.empty, files.rendezvous
    rooms.own_obstacle = lambda *_: None
    peers._memcpy_2d = lambda: _memcpy_2d
    for kernel in (chunk_gemm_triton, gemm_combine, store_rows):
        kernel.sm_count = lambda device: 2
    gemm_combine.TensorDescriptor = None
    gemm_combine.agrees_with_cublas = lambda *_: True
    torch.cuda.Stream = torch.cuda.Event = _Now
    torch.cuda.current_stream = _Now
    compat.current_raw_stream = lambda: 0
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.is_current_stream_capturing = lambda: False


def aten_kernels() -> None:
    """After `install`, for good: the kernels that store to other ranks as ATen's product and memmove."""
    peers.store_rows, gemm_combine.gemm_combine, peers.collect = _store_rows, _gemm_combine, _collect


def _store(address, rows):
    ctypes.memmove(address, rows.data_ptr(), rows.numel() * rows.element_size())


def _tell(meeting):
    meeting.counts[1] += 1
    for address in meeting.flags.tolist():
        ctypes.c_int32.from_address(address + 4 * meeting.place).value = int(meeting.counts[1])


def _wait(meeting):
    own, begin = meeting.flags[meeting.place].item(), time.monotonic()
    for rank in range(meeting.flags.numel()):
        while ctypes.c_int32.from_address(own + 4 * rank).value < meeting.counts[1]:
            if time.monotonic() - begin > meeting.timeout_ms / 1000:
                raise RuntimeError("CUDA error: unspecified launch failure")
            time.sleep(1e-4)


def _store_rows(source, addresses, first, length, stored, rank, meeting):
    batch, P, _, width = source.shape
    for peer, address in enumerate(addresses.tolist()):
        for b in range(batch if address else 0):
            begin = (P * batch * first + (rank * batch + b) * length) * width * source.element_size()
            _store(address + begin, source[b, peer, first : first + (length if peer == rank else stored)].contiguous())
    _tell(meeting)
    _wait(meeting)


def _collect(results, meeting):
    _wait(meeting)
    return results.clone()


def _gemm_combine(left, right, bias, addresses, batch, tokens, row, bias_form, meeting):
    product = torch.bmm(left, right)
    if bias_form == gemm_combine.ADD:
        product = product + bias.unsqueeze(1)
    elif bias_form == gemm_combine.BADDBMM:
        product = torch.baddbmm(bias.unsqueeze(1).expand_as(product), left, right)
    width, size = right.shape[2], left.element_size()
    for peer, address in enumerate(addresses.tolist()):
        for b in range(batch):
            rows = product[:, peer * batch + b].contiguous()
            _store(address + (b * tokens + row) * width * size, rows)
    _tell(meeting)
