"""How a kernel tells the other ranks of a host that it has stored all it had to store, and how one waits for them.

Every rank has a flag for each rank of its domain in symmetric memory, and beside the kernels two numbers of its own:
the programs of the running grid that are done, and how many grids have been. The last program that is done raises its
rank's flag at every rank to the count of grids; a rank waits until all its flags have reached its own count. The counts
live on the device, so that eager calls and replays of a CUDA graph can follow one another; all ranks run the same
grids in the same order.

What the programs of a grid have stored is seen by whoever waits: each program counts itself behind its stores, the last
one raises flags behind all counts (release and acquire, for the whole system, which is cumulative).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

FLAG_BYTES = 4096  # behind a symmetric buffer: an int32 for each rank of the domain


@dataclass(frozen=True)
class Meeting:
    """`flags` [ranks], int64: where each rank's flags begin; `counts` [2], int32; both on the device.

    `place`: the rank's in the domain. A wait that lasts longer than `timeout_ms` ends the process's use of its GPU.
    """

    flags: torch.Tensor
    counts: torch.Tensor
    place: int
    timeout_ms: int

    @functools.cached_property
    def numbers(self) -> tuple[Any, ...]:
        """What the kernels are given beside `flags` and `counts`."""
        return self.place, self.flags.numel(), 1_000_000 * self.timeout_ms

    @functools.cached_property
    def timed(self) -> bool:
        """Whether a wait can end by itself: Triton's interpreter has no clock."""
        return self.flags.is_cuda


if triton is not None:

    @triton.jit
    def tell(flags, counts, place, ranks, programs):
        """To be called by all of a grid's `programs` behind their last stores. Whether this was the last one."""
        tl.debug_barrier()  # the count is one thread's
        last = tl.atomic_add(counts, 1, sem="acq_rel", scope="sys") == programs - 1
        if last:
            tl.store(counts, 0)
            grids = tl.load(counts + 1) + 1
            tl.store(counts + 1, grids)
            for rank in range(ranks):
                flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + place
                tl.atomic_xchg(flag, grids, sem="release", scope="sys")
            tl.debug_barrier()  # what follows reads the count
        return last

    @triton.jit
    def wait(flags, counts, place, ranks, timeout, TIMED: tl.constexpr):
        """Until all ranks have run as many grids as this one."""
        grids = tl.load(counts + 1)
        own = tl.load(flags + place).to(tl.pointer_type(tl.int32))
        if TIMED:
            begin = _nanoseconds()
        for rank in range(ranks):
            while tl.atomic_add(own + rank, 0, sem="acquire", scope="sys") - grids < 0:
                if TIMED:
                    if _nanoseconds() - begin > timeout:
                        _trap()
        tl.debug_barrier()  # one thread has waited for all

    @triton.jit
    def _nanoseconds():
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )  # fmt: skip

    @triton.jit
    def _trap():
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
