"""How this project defines its operators, `torch.ops.compile_overlap.*`.

By `torch.library.Library`: the checks that `torch.library.custom_op` makes at each call cost the host 30 us and more,
and a layer calls up to twenty operators. What these checks would find, `opcheck` finds in the tests. The operators read
their arguments and return new tensors (`peer_take` may return its group's buffer); backward is written where they are
called (`autograd.Function`, or compiled graphs), so none has an autograd kernel.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from . import compat, ranges

TAGS = torch.Tag.pt2_compliant_tag, *compat.LAYOUT_TAGS
LIBRARY = torch.library.Library("compile_overlap", "FRAGMENT")


def operator(kernel: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define the operator that is called as the function and runs it on every device; the schema is its annotations."""
    name = kernel.__name__
    schema = torch.library.infer_schema(kernel, mutates_args=())
    LIBRARY.define(name + schema, tags=TAGS)
    LIBRARY.impl(name, ranges.named(kernel), "CompositeExplicitAutograd")
    return getattr(torch.ops.compile_overlap, name).default


def fake_of(op: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], None]:
    """Decorate the function that says what an operator returns: the same shapes, dtypes and strides, no content."""

    def register(fake: Callable[..., Any]) -> None:
        torch.library.register_fake(op.name(), fake, lib=LIBRARY)

    return register
