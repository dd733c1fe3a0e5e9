"""Machines: what GEMMs take in waves of tiles, who shares what on hosts, and what a measurement replaces."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_overlap.costs import Costs
from compile_overlap.machines import GPUS, H200, NVLINK, PROBE_SHARE, SHARED_MEMORY, STACKS, machine

sizes = st.integers(1, 2048)


def test_gemms_of_the_default_workload_take_what_their_traces_show():
    def milliseconds(batch, inner, columns):
        return 1e3 * H200.gemm_seconds(batch, 1024, inner, columns, 2)

    assert milliseconds(16, 1280, 15360) == pytest.approx(0.870, rel=0.03)
    assert milliseconds(16, 7680, 1280) == pytest.approx(0.411, rel=0.03)
    assert milliseconds(4, 7680, 1280) == pytest.approx(0.101, rel=0.06)


def test_tiles_come_in_waves():
    memory_is_free = replace(H200, bytes_per_s=math.inf)

    def whole_tiles(batch):
        return memory_is_free.gemm_seconds(batch, 128, 4096, 256, 2)

    assert whole_tiles(1) == whole_tiles(66) < whole_tiles(264) < whole_tiles(265)


def test_few_rows_are_bound_by_the_weights():
    assert H200.gemm_seconds(32, 4, 1280, 15360, 2) == pytest.approx(2 * 32 * 1280 * 15360 / H200.bytes_per_s, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 32), sizes, sizes, sizes, st.integers(0, 64))
def test_more_work_or_fewer_sms_never_take_less(batch, rows, inner, columns, reserved):
    seconds = H200.gemm_seconds(batch, rows, inner, columns, 2)
    assert seconds > 0
    assert H200.gemm_seconds(batch + 1, rows, inner, columns, 2) >= seconds * (1 - 1e-9)
    assert H200.gemm_seconds(batch, rows, inner + 1, columns, 2) >= seconds
    assert H200.gemm_seconds(batch, rows, inner, columns, 2, reserved) >= seconds * (1 - 1e-9)


def test_named_machines():
    assert set(GPUS) == {"H20", "H100", "H800", "H200"} and len(STACKS) == 4
    h100, h800 = machine("H100"), machine("H800")
    assert h800.gpu.flops_per_s == h100.gpu.flops_per_s and h800.local.bytes_per_s < h100.local.bytes_per_s / 2
    assert machine(link=SHARED_MEMORY.name).memory_bytes_per_s is None


def test_ranks_share_the_cards_of_their_host():
    two_hosts = machine(cards=4)
    assert (two_hosts.hosts(16), two_hosts.local_ranks(16), two_hosts.hosts(8)) == (2, 8, 1)
    assert two_hosts.network(16).bytes_per_s == two_hosts.card.bytes_per_s / 2
    with pytest.raises(ValueError, match="P = 9: must be a multiple of its 2 hosts of 8 GPUs"):
        two_hosts.local_ranks(9)


def test_what_was_measured_on_a_group_replaces_what_is_known():
    measured = machine().with_costs(Costs(5e-5, 24e9, 5.6e14))
    assert (measured.local.bytes_per_s, measured.local.latency_s) == (24e9, 5e-5)
    assert measured.local.beside == SHARED_MEMORY.beside != NVLINK.beside
    assert measured.gpu.flops_per_s == pytest.approx(5.6e14 / PROBE_SHARE) and measured.hosts(64) == 1
