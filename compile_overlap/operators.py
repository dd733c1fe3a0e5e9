"""How this project defines its operators, `torch.ops.compile_overlap.*`.

By `torch.library.Library`: the checks that `torch.library.custom_op` makes at each call cost the host 30 us and more,
and a layer calls up to twenty operators. What these checks would find, `opcheck` finds in the tests. The operators read
their arguments and return new tensors (`peer_take` may return its group's buffer); backward is written where they are
called (`autograd.Function`, or compiled graphs), so none has an autograd kernel.

`direct` holds the functions themselves, for generated code that calls them without the dispatcher (`passes.call_directly`).
"""

from __future__ import annotations

import types
from typing import Any, Callable

import torch

from . import compat, ranges

TAGS = torch.Tag.pt2_compliant_tag, *compat.LAYOUT_TAGS
NAMESPACE = "compile_overlap"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
direct = types.SimpleNamespace()


def operator(kernel: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define the operator that is called as the function and runs it on every device; the schema is its annotations."""
    name = kernel.__name__
    schema = torch.library.infer_schema(kernel, mutates_args=())
    LIBRARY.define(name + schema, tags=TAGS)
    run = ranges.named(kernel)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    setattr(direct, name, run)
    return getattr(torch.ops.compile_overlap, name).default


def name_of(op: Any) -> str | None:
    """The name of one of our operators in `direct`; None for any other."""
    namespace, _, name = op.name().partition("::") if isinstance(op, torch._ops.OpOverload) else ("", "", "")
    return name if namespace == NAMESPACE and hasattr(direct, name) else None


def fake_of(op: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], None]:
    """Decorate the function that says what an operator returns: the same shapes, dtypes and strides, no content."""

    def register(fake: Callable[..., Any]) -> None:
        torch.library.register_fake(op.name(), fake, lib=LIBRARY)

    return register
