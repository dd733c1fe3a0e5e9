"""The chunks' local computation, in the two numeric recipes and the two bias forms.

Under eager execution every bias, norm, gate and product rounds to the tensors' dtype; a graph that Inductor fuses keeps
them in fp32 registers. The two differ in the last bits, so the layer can be written for either reference:

- `eager_exact`: each rounding exactly as eager does it, through opaque operators (`exact`).
- `inductor`: plain operators, which Inductor fuses as it fuses the reference's.

Each with the two biases added after the product (`add`) or inside it (`baddbmm`), since these differ too.
"""

from __future__ import annotations

import torch
from torch.autograd import Function

from .. import compat
from ..kernels import chunk_gemm_triton, exact_gated_norm, gated_norm_grad, inductor_gated_norm
from ..schedule import BACKWARD, FORWARD
from . import exact

EAGER_EXACT, INDUCTOR = "eager_exact", "inductor"
RECIPES = (EAGER_EXACT, INDUCTOR)
ADD, BADDBMM = "add", "baddbmm"
BIAS_FORMS = (ADD, BADDBMM)
NORM = "norm"  # with an order, `norm1024x8`: our kernel for the `inductor` recipe's gated norm


def local_ffns(
    w1: torch.Tensor,
    b1: torch.Tensor,
    wout: torch.Tensor,
    bout: torch.Tensor,
    norms: tuple[torch.Tensor, ...],
    *,
    sizes: tuple[int, ...],
    rows: int,
    recipe: str,
    bias: str,
    eps: tuple[float, float],
    exact_gradients: bool,
    triton: tuple[str, ...] = (),
    rounds_as_eager: bool = False,
):
    """One function [l,n,D] -> [l,n,D] for each chunk of l = `sizes[c]` tokens; n = `rows` is P*B.

    `norms` are gamma_x, beta_x, gamma_gate, beta_gate [H] in the weights' dtype. `exact_gradients` makes every gradient
    of `eager_exact` eager's (see `exact`); the `inductor` recipe, whose sums are in fp32, has no use for it.
    `triton`: what runs by our kernels (see `schedule.Plan`): first GEMMs that are a `bmm`, the `inductor` recipe's norm.
    `rounds_as_eager`: so does Inductor (`compat.rounds_as_eager`); then the `inductor` recipe's backward is plain too.
    """
    weights = zip(w1.split(sizes), wout.split(sizes))
    own = tuple(direction in triton for direction in (FORWARD, BACKWARD))
    if recipe == INDUCTOR:
        biases = zip((b.unsqueeze(1) for b in b1.split(sizes)), (b.unsqueeze(1) for b in bout.split(sizes)))
        shared = zip(*(_Share.apply(norm, len(sizes)) for norm in norms))
        orders = [tuple(map(int, name[len(NORM) :].split("x"))) for name in triton if name.startswith(NORM)]
        order, plain = orders[0] if orders else None, rounds_as_eager
        return [_fused(*w, *b, n, bias, eps, own, order, plain) for w, b, n in zip(weights, biases, shared)]
    norms = exact.Norms.of(norms)
    expanded_bout = [t.transpose(0, 1) for t in exact.expand_rows(bout, rows).split(sizes, dim=1)]
    added = bias == ADD
    biases = zip(b1.split(sizes) if added else _expanded(b1, rows, sizes), expanded_bout)
    carriers = ()
    if exact_gradients:
        carriers = exact.Whole.apply(b1 if added else None, *norms.collecting, *norms.weights, w1, sizes, rows, *eps)
    per_chunk = exact.CARRIERS if exact_gradients else 0
    return [
        _exact(*w, *b, norms, bias, eps, own, carriers[c * per_chunk : (c + 1) * per_chunk])
        for c, (w, b) in enumerate(zip(weights, biases))
    ]


class _Share(Function):
    """A parameter for each chunk, whose gradients are summed over the chunks in fp32 and rounded once.

    Each chunk uses the graph input itself: a node that all chunks share (a conversion, say) would make the partitioner
    see their norms as used far apart, and save other tensors for the later chunks than for the first.
    """

    @staticmethod
    def forward(ctx, parameter, chunks):
        return tuple(parameter.view_as(parameter) for _ in range(chunks))

    @staticmethod
    def backward(ctx, *grads):
        return torch.stack(grads).sum(0, dtype=torch.float32).to(grads[0].dtype), None


def _expanded(b1, rows, sizes):
    return [exact.expand_rows(part, rows).transpose(0, 1) for part in b1.split(sizes)]


def _exact(w1, wout, b1, bout, norms, bias, eps, own, carriers):
    def run(x_lnd):
        if bias == ADD:
            z_lnf = chunk_gemm_triton.bmm(x_lnd, w1, own[0])
            return exact.gated_projection(z_lnf, b1, norms, wout, None, eps, own[1], carriers) + bout
        z_lnf = torch.baddbmm(b1, x_lnd, w1)
        return exact.gated_projection(z_lnf, None, norms, wout, bout, eps, own[1], carriers)

    return run


def _fused(w1, wout, b1, bout, norms, bias, eps, own, order, plain):
    def run(x_lnd):
        if bias == ADD:
            z_lnf, shift = chunk_gemm_triton.bmm(x_lnd, w1, own[0]), b1
        else:
            z_lnf, shift = torch.baddbmm(b1, x_lnd, w1), None
        added = None if bias == ADD else bout
        # Before a backward that is not plain, torch 2.11 drops a rounding of the gate, which then nothing else reads.
        if gated_norm_grad.takes(z_lnf) and torch.is_grad_enabled() and not plain:
            saved = any(tensor.requires_grad for tensor in (z_lnf, b1, *norms))
            rounded = compat.ROUNDS_SAVED_SUMS_ONLY and shift is not None and saved
            probed = saved or not compat.ROUNDS_SAVED_SUMS_ONLY  # with gradients enabled, the order of saved sums is known
            known = order if probed else None
            y_lnd = _GatedProjection.apply(z_lnf, shift, *norms, wout, added, *eps, own[1], known, rounded)
        else:
            y_lnd = _project(_gated_norm(z_lnf, shift, norms, eps, order, False)[0], wout, added)
        return y_lnd + bout if bias == ADD else y_lnd

    return run


def _gated_norm(z_lnf, shift, norms, eps, order, rounded):
    """The product [l,n,H], and mean and reciprocal deviation of both norms, each [l,n,1]."""
    if order is None:
        return exact_gated_norm.plain(z_lnf, shift, *norms, *eps)
    bias = None if shift is None else shift.squeeze(1)
    return exact_gated_norm.unpacked(inductor_gated_norm.inductor_gated_norm(z_lnf, bias, *norms, *eps, rounded, *order))


def _project(h_lnh, wout, bout):
    return torch.bmm(h_lnh, wout) if bout is None else torch.baddbmm(bout, h_lnh, wout)


class _GatedProjection(Function):
    """Gated norm and second GEMM: forward plain operators, which Inductor fuses as the reference's, or their kernel.

    Backward runs the kernels of `gated_norm_grad`, which read the operands of all its gradients twice instead of once
    for each, and give back the product that the weight gradient needs.
    """

    @staticmethod
    def forward(ctx, z, shift, gamma_x, beta_x, gamma_gate, beta_gate, wout, bout, eps_x, eps_gate, own, order, rounded):
        norms = gamma_x, beta_x, gamma_gate, beta_gate
        ctx.shifted, ctx.added, ctx.own = shift is not None, bout is not None, own
        ctx.rounded = rounded
        if rounded and order is None:
            z, shift = z + shift, None
        h, *stats = _gated_norm(z, shift, norms, (eps_x, eps_gate), order, rounded)
        ctx.save_for_backward(z, shift, *norms, wout, *stats)
        return _project(h, wout, bout)

    @staticmethod
    def backward(ctx, grad):
        z, shift, *norms, wout, mean_x, rstd_x, mean_gate, rstd_gate = ctx.saved_tensors
        grad_h = chunk_gemm_triton.product(grad, wout.transpose(1, 2), ctx.own)
        bias = None if shift is None else shift.squeeze(1)
        grad_z, h, grad_bias, grad_norms = gated_norm_grad.gated_norm_grad(
            grad_h, z, bias, *norms, mean_x, rstd_x, mean_gate, rstd_gate, ctx.rounded
        )
        grad_shift = grad_bias.unsqueeze(1).to(z.dtype) if ctx.shifted else None
        grad_wout = torch.bmm(h.transpose(1, 2), grad)
        grad_bout = grad.sum(1, keepdim=True) if ctx.added else None
        return grad_z, grad_shift, *grad_norms.to(z.dtype).unbind(), grad_wout, grad_bout, *(None,) * 5
