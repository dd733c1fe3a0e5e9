"""The dependency critical path: of known calls, and of any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure import MAIN, NETWORK, NVJET, SEND_RECV, pipeline

from compile_overlap.measure import Call
from compile_overlap.measure.critical_path import by_kind, critical_path, inferred
from compile_overlap.measure.events import Event


def test_critical_path_tiles_the_call_and_follows_dependencies():
    events = pipeline()
    exact = critical_path(events, [[], [0], [0], [1, 2], [3]])
    assert [part.index for part in exact] == [0, 2, 2, 3, 4]
    assert [part.what for part in exact] == ["nccl", "idle", "nccl", "wait", "gemm-combine"]
    assert by_kind(exact) == {"nccl": 35, "wait": 15, "gemm-combine": 10, "idle": 10}
    # Not told, the second exchange follows the first one; the last GEMM follows what ended before it.
    assert critical_path(events) == exact


def test_the_critical_path_does_not_blame_an_exchange_that_nobody_waited_for():
    events = (
        Event(NVJET, "gemm", 0, 10, MAIN),
        Event(SEND_RECV, "nccl", 5, 11, NETWORK),
        Event(NVJET, "gemm", 12, 20, MAIN),
    )
    assert by_kind(critical_path(events, [[], [], [0]])) == {"gemm": 18, "idle": 2}
    # Without dependencies it is blamed, and what it followed is not known.
    assert by_kind(critical_path(events)) == {"gemm": 8, "nccl": 6, "idle": 6}


def test_an_event_of_no_duration_does_not_end_the_path():
    events = (
        Event(NVJET, "gemm", 0, 10, MAIN),
        Event("put_signal_kernel", "signal", 10, 10, MAIN),
        Event(NVJET, "gemm", 10, 20, MAIN),
    )
    assert by_kind(critical_path(events, [[], [0], [1]])) == by_kind(critical_path(events)) == {"gemm": 20}


def test_a_cause_that_ends_a_little_later_by_another_clock_is_on_the_path():
    events = (Event(SEND_RECV, "nccl", 0, 20.2, NETWORK), Event("put_signal_kernel", "signal", 19.9, 20, MAIN))
    late = (*events, Event(NVJET, "gemm", 20, 30, MAIN))
    path = critical_path(late, [[], [0], [1]])
    assert [(part.what, part.begin, part.end) for part in path] == [("nccl", 0, 20), ("gemm", 20, 30)]
    assert by_kind(critical_path(late, [[2], [0], [1]])) == {"nccl": 20, "gemm": 10}  # a circle ends


def test_inferred_the_last_to_end_is_the_cause_not_the_last_to_begin():
    last = Event(NVJET, "gemm", 100, 120, MAIN)
    events = (Event(NVJET, "gemm", 0, 100, MAIN), Event("pack", "other", 50, 60, 30), last)
    assert by_kind(critical_path(events)) == {"gemm": 120}
    elsewhere = (*events[:2], Event(NVJET, "gemm", 100, 120, 31))
    assert by_kind(critical_path(elsewhere)) == {"gemm": 120}


def test_inference_looks_at_each_event_a_few_times(monkeypatch):
    looked_up = []
    monkeypatch.setattr(Event, "computes", property(lambda event: looked_up.append(event) or event.kind == "gemm"))
    events = tuple(Event(NVJET, "gemm", 2 * index, 2 * index + 1, MAIN) for index in range(1000))
    assert inferred(events)[-1] == [998] and len(looked_up) < 5 * len(events)


@pytest.mark.parametrize("launched, reason", [(15.0, "host"), (5.0, "latency"), (None, "idle")])
def test_gaps_have_reasons(launched, reason):
    events = (Event(NVJET, "gemm", 0, 10, MAIN), Event(NVJET, "gemm", 18, 20, MAIN, launched))
    assert by_kind(critical_path(events)) == {"gemm": 12, reason: 8}


events_on_two_streams = st.lists(
    st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=14
)  # fmt: skip


@given(events_on_two_streams)
@settings(max_examples=200, deadline=None)
def test_any_critical_path_is_as_long_as_its_call(rows):
    events = sorted(
        (
            Event(NVJET if gemm else SEND_RECV, "gemm" if gemm else "nccl", begin, begin + size)
            for gemm, begin, size in rows
        ),
        key=lambda event: event.begin,
    )
    parts = critical_path(events)
    assert sum(part.end - part.begin for part in parts) == Call(tuple(events)).span
    assert all(before.end == after.begin for before, after in zip(parts, parts[1:]))


def test_critical_path_rejects():
    with pytest.raises(ValueError, match="at least one event"):
        critical_path(())
    with pytest.raises(ValueError, match="dependencies of 1 events"):
        critical_path(pipeline(), [[]])
