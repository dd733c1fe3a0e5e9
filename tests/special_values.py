"""Values at the ends of a dtype's range and beyond, and the comparison of results that hold them."""

from __future__ import annotations

import torch


def specials(dtype):
    """Zeros, denormals, the smallest and largest numbers, infinities, NaN."""
    info = torch.finfo(dtype)
    values = (0.0, info.smallest_normal * info.eps, info.tiny, info.eps, 1.0, info.max**0.5, info.max, float("inf"))
    return (*values, *(-value for value in values), float("nan"))


def same(got, expected):
    """Whether two tensors are NaN at the same positions and have the same bits elsewhere; -0.0 is not 0.0.

    A NaN's own bits are not compared: which operand's an instruction hands on depends on how the code was vectorised.
    """
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    nan = expected.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(got.view(integers)[~nan], expected.view(integers)[~nan])
