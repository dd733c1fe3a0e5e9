"""Which recipe and bias form the reference uses: found by comparing, or, while a graph is traced, by watching.

Outside a graph, `ffn.forward(inputs[:min(B,2)], overlap="none")` runs once under no_grad and the first candidate that
equals it bit for bit on every rank is taken. Inside an outer `torch.compile` nothing can be run on the group, and the
recipe is `inductor`; the bias form is read off the operators that the reference's comp-only path calls.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .config import Settings
from .group import all_ranks
from .layout import Layout
from .recipes import ADD, BADDBMM, BIAS_FORMS, RECIPES

Candidate = tuple[str, str]


def candidates(settings: Settings) -> list[Candidate]:
    """(recipe, bias form) pairs in the order they are tried."""
    recipes = (settings.recipe,) if settings.recipe else RECIPES
    forms = (settings.bias,) if settings.bias else BIAS_FORMS
    return [(recipe, form) for recipe in recipes for form in forms]


def matching_candidate(
    ffn: Any,
    inputs: torch.Tensor,
    layout: Layout,
    settings: Settings,
    run: Callable[[torch.Tensor, Candidate], torch.Tensor | None],
) -> Candidate | None:
    """The first candidate whose `run(slice, candidate)` equals the reference on every rank; None if none does.

    `run` returns None where the candidate cannot be compiled, alike on every rank. A single candidate left by the
    settings is taken without a run.
    """
    choices = candidates(settings)
    if len(choices) == 1:
        return choices[0]
    with torch.no_grad():
        part = inputs.detach()[: min(layout.B, 2)]
        reference = ffn.forward(part, overlap="none")
        for choice in choices:
            got = run(part, choice)
            equal = got is not None and torch.equal(got, reference)
            if all_ranks(ffn.ep_group, layout.P, inputs.device, equal):
                return choice
    return None


class _Calls(TorchDispatchMode):
    """Collects the operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def observed_bias_form(ffn: Any) -> str:
    """`baddbmm` if the reference's local computation calls it, else `add`. Runs one row, without communication."""
    tokens = ffn.w1.shape[0] * ffn.ep_group_size
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Calls() as calls:
        ffn.forward(ffn.w1.new_zeros((1, tokens, ffn.w1.shape[1])), overlap="none", comp_only=True)
    return BADDBMM if torch.ops.aten.baddbmm.default in calls.seen else ADD
