"""Forward and gradients of a layer in two modes, compared bit for bit or by the checker's gates."""

from __future__ import annotations

import torch

GATES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
NORMS = ("norm_x.weight", "norm_x.bias", "norm_gate.weight", "norm_gate.bias")


def outputs_and_gradients(call, module, x, upstream):
    """(output, {name: gradient}) of `call(x)` for the input and every parameter of `module` that asks for one."""
    module.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    out = call(leaf)
    out.backward(upstream)
    named = [("inputs", leaf), *module.named_parameters()]
    return out.detach(), {name: t.grad.clone() for name, t in named if t.grad is not None}


def unequal(first, second):
    """Names whose gradients differ in any bit; the two must have the same names."""
    assert first.keys() == second.keys()
    return sorted(name for name in first if not torch.equal(first[name], second[name]))


def worst_relative(first, second):
    """Largest Frobenius relative error over the gradients, the denominator clamped as the checker does."""
    errors = [
        float((first[name].double() - second[name].double()).norm() / first[name].double().norm().clamp_min(1e-12))
        for name in first
    ]
    return max(errors)
