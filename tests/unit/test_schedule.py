"""Schedules: every step once, in an order that can run, within the budgets, and worth what the simulation says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_overlap import plan as planning
from compile_overlap.config import Settings
from compile_overlap.layout import Layout
from compile_overlap.costs import Costs, rounded
from compile_overlap.schedule import BACKWARD, FORWARD, FREE, GEMM, START, WAIT, Plan, Work, build

plans = st.builds(
    Plan,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8).map(tuple),
    ratio_16ths=st.integers(1, 64),
    ahead=st.integers(1, 8),
    backlog=st.integers(0, 3),
    reserved_sms=st.integers(0, 32),
    peers=st.booleans(),
    own_first=st.booleans(),
    head=st.integers(0, 4),
    triton=st.sampled_from([(), (FORWARD,), (FORWARD, BACKWARD), (BACKWARD, "norm1024x8")]),
    disabled=st.sampled_from([(), ("reorder",), ("pin-order", "reorder")]),
)


def labels(schedule):
    return [schedule.label(step) for step in schedule.steps]


def test_forward_order_of_four_chunks():
    schedule = build(FORWARD, Plan((2, 2, 2, 2), ahead=1), (Work(2),) * 4)
    assert labels(schedule) == [
        *("D0", "D1", "wait D0", "gemm0 0", "gemm1 0", "C0"),
        *("D2", "wait D1", "gemm0 1", "gemm1 1", "C1"),
        *("D3", "wait D2", "gemm0 2", "gemm1 2", "C2"),
        *("wait D3", "gemm0 3", "gemm1 3", "C3"),
        *("wait C0", "wait C1", "wait C2", "wait C3"),
    ]


def test_backward_order_of_three_chunks():
    schedule = build(BACKWARD, Plan((2, 2, 2), ahead=2, backlog=1), (Work(2, 2),) * 3)
    assert labels(schedule) == [
        *("C0'", "C1'", "wait C0'", "gemm0 0", "C2'", "gemm1 0", "D0'"),
        *("wait C1'", "gemm0 1", "gemm1 1", "D1'", "free0 0", "free1 0"),
        *("wait C2'", "gemm0 2", "gemm1 2", "D2'"),
        *("free0 1", "free1 1", "free0 2", "free1 2"),
        *("wait D0'", "wait D1'", "wait D2'"),
    ]


def test_weight_gradients_fill_the_time_until_a_late_chunk_arrives():
    schedule = build(BACKWARD, Plan((2, 2), ratio_16ths=64, backlog=2), (Work(2, 2),) * 2)
    names = labels(schedule)
    assert names.index("free1 0") < names.index("wait C1'")


@given(plans, st.integers(0, 2), st.booleans(), st.sampled_from([FORWARD, BACKWARD]))
def test_every_schedule_can_run(plan, free, second, direction):
    work = Work(2, free, second)
    schedule = build(direction, plan, (work,) * len(plan.sizes))
    done, owed = set(), 0
    for step in schedule.steps:
        assert step[:4] not in done
        if step.kind == WAIT:
            assert (START, step.chunk, step.exchange, 0) in done
        elif step.kind in (GEMM, FREE):
            assert (WAIT, step.chunk, 1, 0) in done
        elif step.exchange == 2:
            assert all((GEMM, step.chunk, 0, index) in done for index in range(2))
            owed += free
        if step.kind == FREE:
            owed -= 1
        done.add(step[:4])
    assert len(done) == len(plan.sizes) * (2 + 2 * second + 2 + free)
    unread = sorted(plan.sizes, reverse=True)[: plan.ahead + 1]
    assert schedule.in_flight() <= sum(unread)


@given(plans)
def test_lanes_do_one_thing_at_a_time(plan):
    intervals = build(BACKWARD, plan, (Work(2, 2),) * len(plan.sizes)).simulate()
    for lane in ("compute", "exchange"):
        own = [i for i in intervals if i.step.lane == lane]
        assert all(before.end <= after.begin + 1e-9 for before, after in zip(own, own[1:]))


@given(plans)
def test_a_plan_survives_being_written(plan):
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["", "8,8", "8,8 r4 a2", "8,8 r4 a2 b1 s0 off="])
def test_parse_rejects(text):
    with pytest.raises(ValueError, match="plan = "):
        Plan.parse(text)


def test_build_needs_work_for_each_chunk():
    with pytest.raises(ValueError, match="works = "):
        build(FORWARD, Plan((2, 2)), (Work(2),))


def test_more_chunks_hide_more_and_one_hides_nothing():
    whole, halves, quarters = (
        build(FORWARD, Plan((8 // count,) * count, ratio_16ths=8), (Work(2),) * count) for count in (1, 2, 4)
    )
    assert whole.exposed() == pytest.approx(2 * 8 * 0.5)
    assert whole.exposed() > halves.exposed() > quarters.exposed()
    assert whole.length() > halves.length() > quarters.length()


DEFAULT = Layout(2, 512, 64, 1280, 7680)
NVLINK, SHARED_MEMORY = Costs(6e-5, 390e9, 5.6e14), Costs(6e-5, 24e9, 5.6e14)


@pytest.mark.parametrize(
    "layout, costs, training, sizes, reserved",
    [
        (DEFAULT, NVLINK, False, (16, 16), 0),
        (DEFAULT, NVLINK, True, (32,), 0),
        (DEFAULT, SHARED_MEMORY, False, (4, 8, 8, 8, 4), 16),
        (DEFAULT, SHARED_MEMORY, True, (8, 16, 8), 16),
        (Layout(2, 4, 16, 128, 256), NVLINK, True, (8,), 0),
    ],
    ids=["nvlink", "nvlink-training", "shared-memory", "shared-memory-training", "small"],
)
def test_the_plan_follows_the_costs(layout, costs, training, sizes, reserved):
    plan = planning.make_plan(layout, 2, "cuda", training, Settings(), costs)
    assert (plan.sizes, plan.reserved_sms) == (sizes, reserved)


def test_settings_win_over_the_search():
    asked = Settings(sizes=(10, 22), in_flight=1, reserved_sms=8, disabled_passes=("reorder",))
    plan = planning.make_plan(DEFAULT, 2, "cuda", False, asked, NVLINK)
    assert plan == Plan((10, 22), plan.ratio_16ths, 1, reserved_sms=8, disabled=("reorder",))
    assert planning.make_plan(DEFAULT, 2, "cpu", False, Settings(), None).sizes == (8, 8, 8, 8)


@pytest.mark.parametrize(
    "layout, settings, sizes, own_first, head",
    [
        (DEFAULT, Settings(), (32,), False, 3),
        (Layout(8, 512, 64, 1280, 7680), Settings(), (8,), False, 2),
        (Layout(2, 128, 64, 1280, 2560), Settings(), (32,), False, 0),
        (DEFAULT, Settings(own_first=True, head=3), (32,), True, 0),
        (DEFAULT, Settings(head=0), (32,), False, 0),
        (DEFAULT, Settings(head=30), (32,), False, 30),
        (DEFAULT, Settings(head=31), (32,), False, 0),
        (DEFAULT, Settings(chunks=4), (8, 8, 8, 8), False, 0),
        (DEFAULT, Settings(sizes=(4, 28), in_flight=1), (4, 28), False, 0),
    ],
    ids=["default", "eight-ranks", "small", "own-first", "all-at-once", "head", "head-too-long", "chunks", "sizes"],
)
def test_the_plan_through_the_peers_memory(layout, settings, sizes, own_first, head):
    plan = planning.peer_plan(layout, "cuda", settings, False, 2)
    assert plan == Plan(sizes, 1, settings.in_flight or 2, peers=True, own_first=own_first, head=head)


def test_costs_are_rounded_so_that_noise_changes_no_plan():
    assert rounded(Costs(1e-5, 1e9, 1e12)) == rounded(Costs(1.05e-5, 0.97e9, 1.04e12))
