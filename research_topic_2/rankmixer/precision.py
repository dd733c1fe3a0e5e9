"""Distances between two tensors of one dtype: absolute errors, mismatch counts, units in the last place."""

import torch

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BLOCK = 1 << 24
_SAMPLE = 1 << 20


def difference(actual, expected):
    """Return (maximum absolute error, number of unequal elements). A NaN anywhere is unequal, by infinity."""
    largest, mismatches = 0.0, 0
    for a, b in _blocks(actual, expected):
        unequal = a != b
        error = torch.where(unequal, (a.float() - b.float()).abs(), 0.0)  # equal infinities have no difference
        largest = max(largest, torch.nan_to_num(error, nan=float("inf"), posinf=float("inf")).max().item())
        mismatches += int(unequal.sum())
    return largest, mismatches


def ulp_statistics(actual, expected):
    """Return (p99, max) of the distance in units in the last place.

    The maximum is exact. The percentile is taken over at most 2**20 evenly strided elements.
    """
    most = max((int(ulp_distance(a, b).max()) for a, b in _blocks(actual, expected)), default=0)
    a, b = actual.reshape(-1), expected.reshape(-1)
    stride = max(1, a.numel() // _SAMPLE)
    ordered = ulp_distance(a[::stride], b[::stride]).sort().values
    return int(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]), most


def ulp_distance(actual, expected):
    """How many representable values of the dtype lie between the elements: int64, the shape of the arguments."""
    return (_ordered(actual) - _ordered(expected)).abs()


def _ordered(tensor):
    """Map floats to integers in the order of their values, both zeros to 0."""
    bits = tensor.contiguous().view(_BITS[tensor.dtype])
    smallest = torch.iinfo(bits.dtype).min
    bits = bits.long()
    return torch.where(bits < 0, smallest - bits, bits)


def _blocks(actual, expected):
    return zip(actual.reshape(-1).split(_BLOCK), expected.reshape(-1).split(_BLOCK))
