"""The wait for all ranks to have stored into a rank's results, alone or with a private copy of them.

At most `_PROGRAMS` programs wait and copy: they keep half of an H200's multiprocessors free for whatever the other ranks may
be waiting for, the kernels of a collective on another stream, say.
"""

from __future__ import annotations

import functools

import torch

from .launch import Launch
from .meeting import Meeting

try:
    import triton
    import triton.language as tl

    from .meeting import wait
except ImportError:
    triton = None

_PROGRAMS, _WARPS, _SMALLEST, _LARGEST = 64, 32, 4096, 32768


def collect(results: torch.Tensor, meeting: Meeting) -> torch.Tensor:
    """A copy of `results`, contiguous, behind a wait for all ranks of the meeting."""
    copy = torch.empty_like(results)
    run = _launch(results.numel(), meeting.numbers, meeting.timed, results.dtype, results.device)
    run(results, copy, meeting.flags, meeting.counts)
    return copy


def wait_for_all(meeting: Meeting) -> None:
    """What follows on this stream runs when all ranks of the meeting have come."""
    _wait_launch(meeting.numbers, meeting.timed)(meeting.flags, meeting.counts)


@functools.lru_cache(maxsize=1024)
def _wait_launch(meeting, timed) -> Launch:
    return Launch(_wait, (1,), meeting, TIMED=timed, num_warps=1)


@functools.lru_cache(maxsize=1024)
def _launch(count, meeting, timed, dtype, device) -> Launch:
    block = min(max(triton.next_power_of_2(triton.cdiv(count, _PROGRAMS)), _SMALLEST), _LARGEST)
    programs = min(triton.cdiv(count, block), _PROGRAMS)
    return Launch(
        _collect, (programs,), (*meeting, count, programs), TIMED=timed, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _wait(flags, counts, place, ranks, timeout, TIMED: tl.constexpr):
        wait(flags, counts, place, ranks, timeout, TIMED)

    @triton.jit
    def _collect(
        results, copy, flags, counts, place, ranks, timeout, count, programs, TIMED: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        wait(flags, counts, place, ranks, timeout, TIMED)
        for begin in range(tl.program_id(0) * BLOCK, count, programs * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(copy + at, tl.load(results + at, mask=at < count), mask=at < count)
