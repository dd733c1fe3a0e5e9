"""Times a call that all ranks of a group make together: caches cold, ranks aligned, as the benchmark does."""

from __future__ import annotations

import time
from typing import Any, Callable

import torch
import torch.distributed as dist

from . import group as groups

_FLUSHED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
_SPIN_CYCLES = 400_000


class Stopwatch:
    """Samples calls on one rank; all ranks of the group sample the same calls in the same order."""

    def __init__(self, group: Any, P: int, device: torch.device):
        self.group, self.P, self.device = group, P, device
        self._flushed = torch.empty(_FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The time of one call on this rank: on CUDA on the device, on CPU of the host.

        Before it the last-level cache is written over, and all ranks wait for each other; on CUDA the device then spins
        for 0.2 ms, so that what the host needs to begin does not count.
        """
        self._flushed.zero_()
        groups.all_ranks(self.group, self.P, self.device, True)
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def slowest(group: Any, P: int, device: torch.device, seconds: list[list[float]]) -> list[list[float]]:
    """Each sample of the rank that took longest for it: rows of equally many seconds, then the same on every rank."""
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    if P > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return agreed.tolist()
