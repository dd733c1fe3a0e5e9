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
from .layer import overlapped_ffn
from .layout import Layout, eps_of, parameters_of
from .recipes import ADD, BADDBMM, BIAS_FORMS, INDUCTOR, RECIPES

Candidate = tuple[str, str]


def undecided(settings: Settings) -> bool:
    """Whether the settings leave the recipe or the bias form to the probe."""
    return settings.recipe is None or settings.bias is None


def candidates(ffn: Any, settings: Settings) -> list[Candidate]:
    """(recipe, bias form) pairs in the order they are tried; the form that the reference is seen to use comes first.

    First, because the forms can agree on one input (biases that are still zero) and differ later.
    """
    recipes = (settings.recipe,) if settings.recipe else RECIPES
    forms = (settings.bias,) if settings.bias else BIAS_FORMS
    if len(forms) > 1 and observed_bias_form(ffn) == BADDBMM:
        forms = (BADDBMM, ADD)
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
    settings is taken without a run. NaN equals NaN here: the input may hold some.
    """
    choices = candidates(ffn, settings)
    if len(choices) == 1:
        return choices[0]
    with torch.no_grad():
        part = inputs.detach()[: min(layout.B, 2)]
        reference = ffn.forward(part, overlap="none")
        for choice in choices:
            got = run(part, choice)
            equal = got is not None and bool(((got == reference) | (got.isnan() & reference.isnan())).all())
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


def _comp_only(ffn: Any, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return ffn.forward(row, overlap="none", comp_only=True)


def observed_bias_form(ffn: Any) -> str:
    """`baddbmm` if the reference's local computation calls it, else `add`. Runs one row, without communication."""
    tokens = ffn.w1.shape[0] * ffn.ep_group_size
    with _Calls() as calls:
        _comp_only(ffn, ffn.w1.new_zeros((1, tokens, ffn.w1.shape[1])))
    return BADDBMM if torch.ops.aten.baddbmm.default in calls.seen else ADD


# Far above rounding in bf16, far below another norm, activation or missing bias.
_SAME_FUNCTION = 0.05


def difference_from_reference(ffn: Any, form: str) -> str | None:
    """Why the layer is not this reference's function (another norm, say), or None: one random row, comp-only.

    The relative Frobenius error is compared with 5 %; bits are not, since eager and Inductor round differently.
    """
    L, D = ffn.w1.shape[:2]
    generator = torch.Generator(ffn.w1.device).manual_seed(0)
    shape = (1, L * ffn.ep_group_size, D)
    row = torch.randn(shape, generator=generator, device=ffn.w1.device).to(ffn.w1.dtype)
    static = {"sizes": (L,), "P": ffn.ep_group_size, "group": None, "exact_gradients": False}
    with torch.no_grad():
        got = overlapped_ffn(row, *parameters_of(ffn), recipe=INDUCTOR, bias=form, eps=eps_of(ffn), **static)
    expected = _comp_only(ffn, row).float()
    error = float((got.float() - expected).norm() / expected.norm().clamp_min(1e-12))
    return None if error <= _SAME_FUNCTION else f"its comp-only output differs from the layer's by {error:.0%}"
