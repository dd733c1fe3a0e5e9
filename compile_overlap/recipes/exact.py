"""`eager_exact`: operators that round exactly where eager PyTorch rounds.

They are opaque to Inductor, which would otherwise fuse the roundings away. The forward is ATen's own sequence, or on
CUDA the Triton kernel that reproduces it bit for bit in one pass. Saved for backward are z and the row statistics, not
the product h, which backward computes again.

Backward comes in two kinds:

- exact: ATen's own sequence, so that every gradient equals eager autograd's. The norm weights are shared by all chunks:
  their gradients are taken by one ATen reduction over all of them (`Whole`), which is eager's own sum bit for bit.
- fast: the fused kernels of `gated_norm_grad` where they run, else ATen's sequence; the norm weights' gradients are
  summed over the chunks in fp32.

On CPU the default is exact: ATen accumulates there in the tensors' dtype, and in bf16 another order moves the norm
weights' gradients by several percent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import Function

from ..kernels import exact_gated_norm as kernel
from ..kernels import chunk_gemm_triton, gated_norm_grad
from ..operators import fake_of, operator

aten = torch.ops.aten


def _stat_dtype(z: torch.Tensor) -> torch.dtype:
    return torch.float32 if z.is_cuda else z.dtype


def _biased_halves(z: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    z = z if bias is None else z + bias.unsqueeze(1)
    return z.chunk(2, dim=-1)


@operator
def gated_norm_forward(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    gamma_x: torch.Tensor,
    beta_x: torch.Tensor,
    gamma_gate: torch.Tensor,
    beta_gate: torch.Tensor,
    eps_x: float,
    eps_gate: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LN_x(U) * silu(LN_gate(G)) of (U,G) = z [l,n,2H] + bias [l,2H]; norm weights [H] in z's dtype.

    Returns the product [l,n,H], and the means and reciprocal standard deviations of U and of G [4,l,n,1].
    """
    call = kernel.forward if kernel.takes(z) else kernel.by_aten
    return call(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate)


@fake_of(gated_norm_forward)
def _(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate):
    length, rows, twice_hidden = z.shape
    return z.new_empty((length, rows, twice_hidden // 2)), z.new_empty((4, length, rows, 1), dtype=_stat_dtype(z))


def _by_aten(grad, z, bias, weights, stats, eps, for_input, for_weights):
    """(gradients of u, gamma_x, beta_x, of g, gamma_gate, beta_gate, and h), by eager autograd's own ATen calls."""
    u, g = _biased_halves(z, bias)
    hidden, mask = [u.shape[-1]], [for_input, for_weights, for_weights]
    normed = aten.native_layer_norm(u, hidden, *weights[:2], eps[0])[0]
    gate = aten.native_layer_norm(g, hidden, *weights[2:], eps[1])[0]
    silu = aten.silu(gate)
    grad_gate = aten.silu_backward(grad * normed, gate)
    grads_x = aten.native_layer_norm_backward(grad * silu, u, hidden, *stats[:2], *weights[:2], mask)
    grads_gate = aten.native_layer_norm_backward(grad_gate, g, hidden, *stats[2:], *weights[2:], mask)
    return *grads_x, *grads_gate, normed * silu


@operator
def gated_norm_backward(
    grad: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    gamma_x: torch.Tensor,
    beta_x: torch.Tensor,
    gamma_gate: torch.Tensor,
    beta_gate: torch.Tensor,
    mean_x: torch.Tensor,
    rstd_x: torch.Tensor,
    mean_gate: torch.Tensor,
    rstd_gate: torch.Tensor,
    eps_x: float,
    eps_gate: float,
    for_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From grad [l,n,H]: gradients of z [l,n,2H] and bias [l,2H], and h [l,n,H] again, all in z's dtype.

    Last the gradients of gamma_x, beta_x, gamma_gate, beta_gate [4,H], in fp32; empty unless `for_weights`. Without a
    bias its gradient is empty.
    """
    weights, stats = (gamma_x, beta_x, gamma_gate, beta_gate), (mean_x, rstd_x, mean_gate, rstd_gate)
    eps = eps_x, eps_gate
    grad_u, *grads_x, grad_g, gamma, beta, h = _by_aten(grad, z, bias, weights, stats, eps, True, for_weights)
    grad_z = torch.cat((grad_u, grad_g), dim=-1)
    grad_bias = z.new_empty(0) if bias is None else grad_z.sum(1)
    grad_norms = _stacked(*grads_x, gamma, beta) if for_weights else z.new_empty(0, dtype=torch.float32)
    return grad_z, h, grad_bias, grad_norms


@fake_of(gated_norm_backward)
def _(
    grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, eps_x, eps_gate,
    for_weights,
):  # fmt: skip
    grad_norms = z.new_empty((4, *gamma_x.shape) if for_weights else 0, dtype=torch.float32)
    return z.new_empty(z.shape), z.new_empty(grad.shape), z.new_empty(0 if bias is None else bias.shape), grad_norms


@operator
def norm_gradients(
    grad: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    gamma_x: torch.Tensor,
    beta_x: torch.Tensor,
    gamma_gate: torch.Tensor,
    beta_gate: torch.Tensor,
    mean_x: torch.Tensor,
    rstd_x: torch.Tensor,
    mean_gate: torch.Tensor,
    rstd_gate: torch.Tensor,
    eps_x: float,
    eps_gate: float,
) -> torch.Tensor:
    """Only the gradients of gamma_x, beta_x, gamma_gate, beta_gate [4,H], in fp32, of what `gated_norm_backward` takes."""
    weights, stats = (gamma_x, beta_x, gamma_gate, beta_gate), (mean_x, rstd_x, mean_gate, rstd_gate)
    _, *grads_x, _, gamma, beta, _ = _by_aten(grad, z, bias, weights, stats, (eps_x, eps_gate), False, True)
    return _stacked(*grads_x, gamma, beta)


@fake_of(norm_gradients)
def _(
    grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, eps_x, eps_gate
):  # fmt: skip
    return z.new_empty((4, *gamma_x.shape), dtype=torch.float32)


def _stacked(*grads: torch.Tensor) -> torch.Tensor:
    return torch.stack([grad.float() for grad in grads])


class Norms(NamedTuple):
    """The four norm weights [H] as the parameters hold them, and fp32 copies that collect the chunks' gradients.

    The copies are only differentiated, never read: a chunk's gradient reaches the parameter in fp32, where the chunks'
    are summed and rounded once.
    """

    weights: tuple[torch.Tensor, ...]
    collecting: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, weights: tuple[torch.Tensor, ...]) -> Norms:
        return cls(tuple(weight.detach() for weight in weights), tuple(weight.float() for weight in weights))


class _GatedProjection(Function):
    """Gated norm and second GEMM; `carriers` (see `Whole`) take the place of the norm weights' gradients."""

    @staticmethod
    def forward(ctx, z, bias, wout, added, *rest):
        _collecting, weights, eps, own, carriers = rest[:4], rest[4:8], rest[8:10], rest[10], rest[11:]
        h, *stats = kernel.unpacked(gated_norm_forward(z, bias, *weights, *eps))
        ctx.save_for_backward(z, bias, wout, *weights, *stats)
        ctx.eps, ctx.own, ctx.exact, ctx.added = eps, own, len(carriers) > 0, added is not None
        return torch.bmm(h, wout) if added is None else torch.baddbmm(added, h, wout)

    @staticmethod
    def backward(ctx, grad):
        z, bias, wout, *weights_and_stats = ctx.saved_tensors
        operands = chunk_gemm_triton.product(grad, wout.transpose(1, 2), ctx.own), z, bias, *weights_and_stats
        if gated_norm_grad.takes(z) and not ctx.exact:
            grad_z, h, grad_bias, grad_norms = gated_norm_grad.gated_norm_grad(*operands, True)
        else:
            grad_z, h, grad_bias, grad_norms = gated_norm_backward(*operands, *ctx.eps, not ctx.exact)
        grad_bias = None if bias is None else grad_bias.to(z.dtype)
        grad_wout = torch.bmm(h.transpose(1, 2), grad)
        unread = (None,) * 7
        norms = (None,) * 4 if ctx.exact else grad_norms.unbind()
        handed_back = (*operands[:2], *weights_and_stats[4:]) if ctx.exact else ()
        return grad_z, grad_bias, grad_wout, grad if ctx.added else None, *norms, *unread, *handed_back


CARRIERS = 6


class Whole(Function):
    """Takes the norm weights' gradients once, over all chunks.

    The forward returns six carriers a chunk, of no content and no memory (expanded zeros), that `gated_projection`
    takes. In backward each chunk hands its output gradient, its z and its statistics back as the carriers' gradients,
    and the sum over rows is taken here, by the reduction over all of them that eager would run.
    """

    @staticmethod
    def forward(ctx, bias, *rest):
        _collecting, weights, (like_z, sizes, rows, *eps) = rest[:4], rest[4:8], rest[8:]
        ctx.save_for_backward(bias, *weights)
        ctx.eps = eps
        H = weights[0].shape[0]
        carriers = []
        for length in sizes:
            carriers.append(like_z.new_zeros(()).expand(length, rows, H))
            carriers.append(like_z.new_zeros(()).expand(length, rows, 2 * H))
            for _ in range(4):
                carriers.append(like_z.new_zeros((), dtype=_stat_dtype(like_z)).expand(length, rows, 1))
        return tuple(carriers)

    @staticmethod
    def backward(ctx, *handed_back):
        bias, *weights = ctx.saved_tensors
        grad, z, *stats = (torch.cat(handed_back[i :: CARRIERS]) for i in range(CARRIERS))
        return None, *norm_gradients(grad, z, bias, *weights, *stats, *ctx.eps).unbind(), *[None] * 9


@operator
def row_sum(grad: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of [l,n,D], as eager's bias gradient: [l,D]."""
    return grad.sum(1)


@fake_of(row_sum)
def _(grad):
    return grad.new_empty((grad.shape[0], grad.shape[2]))


class _ExpandRows(Function):
    @staticmethod
    def forward(ctx, bias, rows):
        return bias.unsqueeze(0).expand(rows, -1, -1)

    @staticmethod
    def backward(ctx, grad):
        return row_sum(grad.transpose(0, 1)), None


def expand_rows(bias_ld: torch.Tensor, rows: int) -> torch.Tensor:
    """`bias_ld` [L,D] as a view [rows,L,D], whose gradient is one ATen sum over the rows.

    Expanded before it is split into chunks, so that the sum runs over all of L in the memory order that the exchange
    leaves, [rows,L,D]: ATen's order of summation depends on both.
    """
    return _ExpandRows.apply(bias_ld, rows)


def gated_projection(
    z_lnf: torch.Tensor,
    bias: torch.Tensor | None,
    norms: Norms,
    wout: torch.Tensor,
    added: torch.Tensor | None,
    eps: tuple[float, float],
    own: bool,
    carriers: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """h @ wout (+ added), for h = LN_x(U) * silu(LN_gate(G)) of (U,G) = z + bias, rounded as eager rounds.

    z [l,n,2H], bias [l,2H], wout [l,H,D], added [l,n,D], inside the product as `baddbmm` adds it: [l,n,D]. With
    `carriers` the backward is exact; with `own` its first GEMM runs by our kernel.
    """
    return _GatedProjection.apply(z_lnf, bias, wout, added, *norms.collecting, *norms.weights, *eps, own, *carriers)
