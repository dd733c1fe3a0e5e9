"""Merged spans against the ticks that they hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_overlap.measure.intervals import common, length, union, without

spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


def bitmap(merged):
    return {tick for begin, end in merged for tick in range(begin, end)}


@given(spans, spans)
@settings(max_examples=300, deadline=None)
def test_intervals_are_sets_of_ticks(left, right):
    merged, other = union(left), union(right)
    for found, ticks in (
        (merged, bitmap(left)),
        (common(merged, other), bitmap(left) & bitmap(right)),
        (without(merged, other), bitmap(left) - bitmap(right)),
    ):
        assert bitmap(found) == ticks and length(found) == len(ticks)
        assert all(begin < end for begin, end in found)
    assert all(end < begin for (_, end), (begin, _) in zip(merged, merged[1:]))


def test_a_span_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match=r"span = \(3, 2\)"):
        union([(3, 2)])
