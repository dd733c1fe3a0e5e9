"""The simulated timeline: what cannot be on any machine, what plans promise, and how it answers known cases."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compile_overlap import plan as planning
from compile_overlap.config import Settings
from compile_overlap.costs import Costs
from compile_overlap.layout import Layout
from compile_overlap.machines import GPUS, LINKS, NVLINK, STACKS, machine
from compile_overlap.schedule import BACKWARD, FORWARD, Plan
from compile_overlap.simulate import (
    COMPUTE, EXCHANGE, HOST, HOST_LEAD_S, LANES, LOCAL, NETWORK, Case, gemm_shapes, simulate,
)  # fmt: skip

DEFAULT = Layout(2, 512, 64, 1280, 7680)
TWO_HOSTS = Layout(16, 512, 64, 1280, 7680)
few = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw, peers=st.booleans()):
    link = draw(st.sampled_from(sorted(LINKS)))
    layout = Layout(draw(st.sampled_from((2, 4, 8, 16))), draw(st.sampled_from((1, 16, 512))), 64, 640, 1280)
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    layout = replace(layout, T=sum(sizes) * layout.P)
    plan = Plan(tuple(sizes), draw(st.integers(1, 64)), reserved_sms=draw(st.sampled_from((0, 16))),
                peers=link == NVLINK.name and draw(peers))  # fmt: skip
    described = machine(
        draw(st.sampled_from(sorted(GPUS))), link, draw(st.sampled_from(sorted(STACKS))), cards=draw(st.integers(1, 8)),
        gpus_per_host=draw(st.sampled_from((1, 2, 8))),
    )  # fmt: skip
    chosen = None if draw(st.integers(0, 4)) == 0 else plan
    return Case(described, layout, chosen, draw(st.booleans()), comm_scale=draw(st.sampled_from((1, 2))))


@few
@given(cases())
def test_a_lane_does_one_thing_at_a_time_and_none_is_longer_than_the_whole(case):
    timeline = simulate(case)
    for lane in LANES:
        own = [i for i in timeline.intervals if i.lane == lane]
        assert all(before.end <= after.begin for before, after in zip(own, own[1:]))
        assert timeline.busy(lane) <= timeline.total + (HOST_LEAD_S if lane == HOST else 0) + 1e-12


@few
@given(cases())
def test_what_is_exposed_is_part_of_the_communication(case):
    timeline = simulate(case)
    assert 0 <= timeline.exposed <= timeline.communication + 1e-12
    assert 0 <= timeline.hidden_fraction <= 1
    assert timeline.communication <= timeline.busy(LOCAL) + timeline.busy(NETWORK) + 1e-12


@few
@given(cases(), st.floats(1.01, 8))
def test_a_better_machine_is_never_slower(case, factor):
    total, described = simulate(case).total, case.machine
    rates = [
        replace(described, local=replace(described.local, bytes_per_s=described.local.bytes_per_s * factor)),
        replace(described, card=replace(described.card, bytes_per_s=described.card.bytes_per_s * factor)),
        replace(described, local=replace(described.local, latency_s=described.local.latency_s / factor)),
        replace(described, gpu=replace(described.gpu, bytes_per_s=described.gpu.bytes_per_s * factor)),
        replace(described, gpu=replace(described.gpu, flops_per_s=described.gpu.flops_per_s * factor)),
    ]
    for better in rates:
        assert simulate(replace(case, machine=better)).total <= total + 1e-12
    assert simulate(replace(case, exchanged=False)).total <= total + 1e-12


@few
@given(cases())
def test_the_critical_path_has_no_gaps_and_ends_last(case):
    timeline = simulate(case)
    path = timeline.critical_path()
    assert path[-1].end == timeline.total and path[0].begin <= 0
    assert all(before.end == after.begin for before, after in zip(path, path[1:]))


@few
@given(cases())
def test_the_same_case_has_the_same_timeline(case):
    first = simulate(case)
    simulate.cache_clear()
    assert simulate(replace(case)) == first


@few
@given(cases(peers=st.just(False)))
def test_one_chunk_is_the_sum_of_its_parts(case):
    """Forward, with a host that costs nothing: computation and both exchanges one after the other."""
    idle = replace(case.machine.stack.own, launch_s=0.0, collective_s=0.0, call_s=0.0)
    stack = replace(case.machine.stack, own=idle)
    whole = replace(case, machine=replace(case.machine, stack=stack), plan=Plan((case.layout.L,)), training=False)
    assume(case.machine.hosts(case.layout.P) == 1)
    timeline = simulate(whole)
    assert timeline.total == pytest.approx(timeline.busy(COMPUTE) + timeline.busy(LOCAL))
    assert timeline.exposed == pytest.approx(timeline.communication)
    assert timeline.hidden_fraction == pytest.approx(0, abs=1e-9)


layouts = st.builds(
    lambda P, B, tokens, D, k: Layout(P, B, P * tokens, D, D * k),
    st.sampled_from((2, 4, 8, 16)), st.integers(1, 512), st.integers(1, 32), st.sampled_from((128, 640, 1280)),
    st.sampled_from((2, 3, 6)),
)  # fmt: skip
measured = st.builds(Costs, st.floats(1e-6, 1e-3), st.floats(1e9, 5e11), st.floats(1e13, 1e15))


@few
@given(layouts, measured, st.booleans(), st.sampled_from(("cuda", "cpu")))
def test_the_plan_is_never_predicted_slower_than_the_unchunked_one(layout, costs, training, device):
    plans = planning.ranked(layout, 2, device, training, Settings(), costs)
    described = planning._machine(device, costs)
    predicted = [simulate(Case(described, layout, plan, training)).total for plan in plans]
    whole = [total for plan, total in zip(plans, predicted) if plan.sizes == (layout.L,)]
    assert len(whole) == 1 and predicted[0] <= whole[0]
    assert predicted[0] <= min(predicted) * (1 + planning.AS_FAST)
    assert planning.make_plan(layout, 2, device, training, Settings(), costs) == plans[0]
    assert all(sum(plan.sizes) == layout.L for plan in plans) and len(set(plans)) == len(plans)


def test_uneven_chunks_are_among_the_candidates():
    sizes = [plan.sizes for plan in planning.ranked(DEFAULT, 2, "cuda", False, Settings(), Costs(6e-5, 24e9, 5.6e14))]
    assert (4, 8, 8, 8, 4) in sizes and (32,) in sizes and (8, 8, 8, 8) in sizes


def test_asked_chunks_are_the_only_ones_without_costs():
    assert [p.sizes for p in planning.ranked(DEFAULT, 2, "cuda", False, Settings(sizes=(10, 22)), None)] == [(10, 22)]


def test_chunks_hide_exchanges_and_the_sequential_layer_none():
    slow = machine(link="host shared memory")
    none = simulate(Case(slow, DEFAULT))
    chunked = simulate(Case(slow, DEFAULT, Plan((4, 8, 8, 8, 4), 9, reserved_sms=16)))
    assert none.hidden_fraction == pytest.approx(0, abs=1e-9) and chunked.hidden_fraction > 0.7
    assert chunked.total < 0.75 * none.total


def test_without_reserved_sms_a_combine_waits_for_the_next_gemm():
    def first_combine(reserved):
        timeline = simulate(Case(machine(), DEFAULT, Plan((8,) * 4, 1, reserved_sms=reserved)))
        gemm = next(i for i in timeline.intervals if i.lane == COMPUTE and i.label == "gemm0 1")
        return next(i for i in timeline.intervals if i.kind == EXCHANGE and i.label == "C0"), gemm

    combine, gemm = first_combine(0)
    assert combine.begin >= gemm.end
    combine, gemm = first_combine(16)
    assert combine.begin < gemm.end


def test_a_combine_through_the_peers_memory_travels_with_its_gemm():
    timeline = simulate(Case(machine(), DEFAULT, Plan((32,), 1, peers=True)))
    gemm = next(i for i in timeline.intervals if i.lane == COMPUTE and i.label == "gemm1 0")
    combine = next(i for i in timeline.intervals if i.lane == LOCAL and i.label == "C0")
    assert combine.begin == gemm.begin and combine.end < gemm.end
    assert not any(i.label.startswith("pack") for i in timeline.intervals)


def test_only_what_leaves_a_host_uses_its_cards():
    def lanes_of(P):
        return {i.lane for i in simulate(Case(machine(), Layout(P, 512, 64, 1280, 7680), Plan((64 // P,)))).intervals}

    lanes = {P: lanes_of(P) for P in (8, 16)}
    assert NETWORK not in lanes[8] and {LOCAL, NETWORK} <= lanes[16]
    alone = simulate(Case(machine(gpus_per_host=1), Layout(2, 512, 64, 1280, 7680), Plan((32,))))
    assert not any(i.lane == LOCAL for i in alone.intervals)


def test_peers_need_memory_that_they_can_address():
    with pytest.raises(ValueError, match="plan = 32 .* peers: GPUs of host shared memory cannot address"):
        simulate(Case(machine(link="host shared memory"), DEFAULT, Plan((32,), peers=True)))


def test_backward_s_gemms_are_twice_forward_s():
    def operations(direction):
        return sum(2 * rows * inner * columns for rows, inner, columns in gemm_shapes(DEFAULT, direction).values())

    assert operations(BACKWARD) == 2 * operations(FORWARD) == 12 * DEFAULT.rows * DEFAULT.D * DEFAULT.H


def test_chunks_of_rows_read_the_weights_again_and_add_their_gradients():
    few_tokens = Layout(16, 512, 16, 1280, 7680)
    whole = Case(machine(), few_tokens, Plan((1,)), training=True, exchanged=False, by_rows=True)
    parts = replace(whole, plan=Plan((1,) * 4))
    assert simulate(whole) == simulate(replace(whole, by_rows=False))
    assert simulate(parts).total > 1.1 * simulate(whole).total


def test_scaled_communication_and_computation():
    def total(**changed):
        return simulate(Case(machine(), TWO_HOSTS, Plan((2, 2), 9, reserved_sms=16), **changed))

    assert total(comm_scale=2).communication > 1.6 * total().communication
    wide = simulate(Case(machine(), replace(TWO_HOSTS, H=2 * TWO_HOSTS.H), Plan((2, 2), 9, reserved_sms=16)))
    assert wide.layer > 1.9 * total().layer and wide.communication == pytest.approx(total().communication)


def test_one_communicator_runs_its_exchanges_in_order_on_both_lanes():
    case = Case(machine(cards=1), TWO_HOSTS, Plan((2, 2), 16, reserved_sms=16))
    local, network = ([i for i in simulate(case).intervals if i.lane == lane] for lane in (LOCAL, NETWORK))
    assert [i.label for i in local] == [i.label for i in network] == ["D0", "D1", "C0", "C1"]
    assert all(a.begin == b.begin and a.end < b.end for a, b in zip(local, network))
