"""A profile of a GPU holds what the figures need: lanes, launches, ranges, and who waits for whom."""

import pytest
import torch

from compile_overlap import ranges
from compile_overlap.layout import Layout
from compile_overlap.measure import calls_of, profiled, trace_figures
from compile_overlap.measure.critical_path import critical_path
from compile_overlap.measure.combine import local_combine_us
from compile_overlap.schedule import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_copy_beside_a_gemm():
    left = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16)
    source, target, side = torch.randn(1 << 26, device="cuda"), torch.empty(1 << 26, device="cuda"), torch.cuda.Stream()

    def run():
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda._sleep(400_000)
            left @ left
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.profiler.record_function(ranges.exchange(1, 0, False)):
                target.copy_(source)
            left @ left
            torch.cuda.current_stream().wait_stream(side)
            left @ left

    run()
    for call in calls_of(profiled(run))[1:]:
        gemms = [index for index, event in enumerate(call.events) if event.kind == "gemm"]
        (copy,) = (index for index, event in enumerate(call.events) if event.kind == "copy")
        assert len(gemms) == 3 and call.events[copy].label == "dispatch 0"
        assert all(event.launched is not None for event in call.events)
        if call.dependencies is not None:  # the driver says where each event was recorded
            assert gemms[0] in call.dependencies[copy] and copy in call.dependencies[gemms[2]]
            assert copy not in call.dependencies[gemms[1]]
        assert [part.index for part in critical_path(call.events, call.dependencies)][-1] == gemms[2]
        assert trace_figures(call)["communication_us"] > 0


def test_local_stores_are_timed():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    layout, plan = Layout(P=2, B=64, T=16, D=256, H=512), Plan((8,), peers=True)
    times = local_combine_us(layout, plan, torch.bfloat16, torch.device("cuda"), backward=True)
    assert times.keys() == {"combine 0", "dispatch' 0"} and all(time > 0 for time in times.values())
