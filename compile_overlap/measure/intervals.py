"""Sets of time as merged intervals: sorted, disjoint, none empty. All figures of a trace are sizes of such sets."""

from __future__ import annotations

from typing import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The merged intervals of `spans`. Raises ValueError for one that ends before it begins."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if end < begin:
            raise ValueError(f"span = {(begin, end)}: must not end before it begins")
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(merged: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in merged)


def common(left: list[Span], right: list[Span]) -> list[Span]:
    """Where both of two merged sets are."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(left: list[Span], right: list[Span]) -> list[Span]:
    """Where the first of two merged sets is and the second is not."""
    kept, first = [], 0
    for begin, end in left:
        while first < len(right) and right[first][1] <= begin:
            first += 1
        for i in range(first, len(right)):
            other_begin, other_end = right[i]
            if other_begin >= end:
                break
            if other_begin > begin:
                kept.append((begin, other_begin))
            begin = other_end
        if begin < end:
            kept.append((begin, end))
    return kept
