"""Latency of a call under a fixed protocol.

Before each sample: the last-level cache is flushed by writing a buffer larger than it, and the ranks are aligned by a
barrier (on CUDA then a short spin on the GPU, so that differences in launching do not count). The call is measured
with CUDA events, or on CPU with the monotonic performance counter. The first of several samples is dropped.
"""

import time
from dataclasses import dataclass

import torch

_FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
_SPIN_CYCLES = 400_000


@dataclass(frozen=True)
class Timing:
    """Mean, minimum and maximum in seconds, and the samples in order without the dropped first one."""

    mean: float
    min: float
    max: float
    samples: list


class Timer:
    """Measures calls on one rank; all ranks of the runtime measure the same calls together.

    Args:
        runtime: the process and its device.
        l2_flush: flush the last-level cache before each sample.
        prewarm_sleep: seconds to sleep before warming up.
        cuda_graph: capture the call once and replay it (CUDA only).
    """

    def __init__(self, runtime, *, l2_flush=True, prewarm_sleep=0.01, cuda_graph=False):
        self.runtime, self.cuda = runtime, runtime.device.type == "cuda"
        self.prewarm_sleep, self.cuda_graph = prewarm_sleep, cuda_graph
        size = _FLUSH_BYTES[runtime.device.type] // 4
        self.flush_buffer = torch.empty(size, dtype=torch.int32, device=runtime.device) if l2_flush else None

    def measure(self, call, *, warmup, num_tests, before=lambda: None):
        """Time ``call`` ``num_tests`` times after ``warmup`` unmeasured calls.

        Args:
            call: takes nothing and returns the output tensor.
            before: runs before each call, outside the measured region.

        Returns:
            (Timing, the last output).
        """
        time.sleep(self.prewarm_sleep)
        graph = None
        for _ in range(warmup):
            before()
            call()
        if self.cuda_graph:
            graph, captured = self._capture(call, before)
            call, before = (lambda: graph.replay() or captured), (lambda: None)
        samples, output = [], None
        for _ in range(num_tests):
            output = None
            before()
            self._align()
            seconds, output = self._sample(call)
            samples.append(seconds)
        output = output.detach().clone() if self.cuda_graph else output.detach()
        kept = samples[1:] if len(samples) > 1 else samples
        return Timing(sum(kept) / len(kept), min(kept), max(kept), kept), output

    def _align(self):
        if self.flush_buffer is not None:
            self.flush_buffer.zero_()
        self.runtime.synchronize()
        self.runtime.barrier()
        if self.cuda:
            torch.cuda._sleep(_SPIN_CYCLES)

    def _sample(self, call):
        if not self.cuda:
            start = time.perf_counter()
            output = call()
            return time.perf_counter() - start, output
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = call()
        end.record()
        torch.cuda.synchronize(self.runtime.device)
        return start.elapsed_time(end) / 1e3, output

    def _capture(self, call, before):
        """Capture ``call`` after side-stream warm-up. The graph dies with ``measure``: a process that still holds
        captured NCCL collectives hangs when it destroys the process group."""
        side = torch.cuda.Stream(self.runtime.device)
        side.wait_stream(torch.cuda.current_stream(self.runtime.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                before()
                call()
        torch.cuda.current_stream(self.runtime.device).wait_stream(side)
        before()
        self.runtime.synchronize()
        self.runtime.barrier()
        self.runtime.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = call()
        return graph, captured


def describe(timing):
    """Mean, min and max in microseconds."""
    return f"mean {timing.mean * 1e6:.1f} us, min {timing.min * 1e6:.1f} us, max {timing.max * 1e6:.1f} us"
