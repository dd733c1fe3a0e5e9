"""`eager_exact`: operators that round exactly where eager PyTorch rounds, forward and backward.

They are opaque to Inductor, which would otherwise fuse the roundings away. The forward of `gated_norm` is ATen's own
sequence, or on CUDA the Triton kernel that reproduces it bit for bit in one pass; only the row statistics are saved, so
backward recomputes the rest. Backward is ATen's own sequence: input, weight and bias gradients equal eager autograd's.

The norm weights are shared by all chunks. Their gradients are summed over the chunks in fp32, or (`Whole`) taken by one
ATen reduction over all chunks, which is eager's own sum bit for bit. On CPU it has to be that one: ATen accumulates
there in the tensors' dtype, and in bf16 another order moves the result by several percent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import Function

from ..kernels import exact_gated_norm as kernel
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """LN_x(U) * silu(LN_gate(G)) of (U,G) = z [l,n,2H] + bias [l,2H]; norm weights [H] in z's dtype.

    Returns the product [l,n,H] and mean and reciprocal standard deviation of U and of G, each [l,n,1].
    """
    call = kernel.forward if kernel.takes(z) else kernel.by_aten
    return call(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate)


@fake_of(gated_norm_forward)
def _(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate):
    length, rows, twice_hidden = z.shape
    stats = [z.new_empty((length, rows, 1), dtype=_stat_dtype(z)) for _ in range(4)]
    return (z.new_empty((length, rows, twice_hidden // 2)), *stats)


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
    for_input: bool,
    for_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of z [l,n,2H], bias [l,2H] and the four norm weights [H] (fp32), by eager autograd's own ATen calls.

    What `for_input` (z and bias) and `for_weights` (norm weights) do not ask for comes back empty.
    """
    u, g = _biased_halves(z, bias)
    hidden, mask = [u.shape[-1]], [for_input, for_weights, for_weights]
    weights_x, weights_gate = (gamma_x, beta_x), (gamma_gate, beta_gate)
    normed = aten.native_layer_norm(u, hidden, *weights_x, eps_x)[0]
    gate = aten.native_layer_norm(g, hidden, *weights_gate, eps_gate)[0]
    grad_normed = grad * aten.silu(gate)
    grad_gate = aten.silu_backward(grad * normed, gate)
    grad_u, *grads_x = aten.native_layer_norm_backward(grad_normed, u, hidden, mean_x, rstd_x, *weights_x, mask)
    grad_g, *grads_gate = aten.native_layer_norm_backward(
        grad_gate, g, hidden, mean_gate, rstd_gate, *weights_gate, mask
    )
    empty = [z.new_empty(0, dtype=torch.float32) for _ in range(4)]
    grads = [t.float() for t in (*grads_x, *grads_gate)] if for_weights else empty
    if not for_input:
        return (z.new_empty(0), z.new_empty(0), *grads)
    grad_z = torch.cat((grad_u, grad_g), dim=-1)
    return (grad_z, grad_z.sum(1) if bias is not None else z.new_empty(0), *grads)


@fake_of(gated_norm_backward)
def _(
    grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, eps_x, eps_gate,
    for_input, for_weights,
):
    shape = gamma_x.shape if for_weights else (0,)
    weights = [gamma_x.new_empty(shape, dtype=torch.float32) for _ in range(4)]
    grad_bias = z.new_empty(0 if bias is None or not for_input else bias.shape)
    return (z.new_empty(z.shape if for_input else 0), grad_bias, *weights)


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


class _GatedNorm(Function):
    """The operator with its gradient; `carriers` (see `Whole`) take the place of the norm weights' gradients."""

    @staticmethod
    def forward(ctx, z, bias, *rest):
        _collecting, weights, eps, carriers = rest[:4], rest[4:8], rest[8:10], rest[10:]
        out, *stats = gated_norm_forward(z, bias, *weights, *eps)
        ctx.save_for_backward(z, bias, *weights, *stats)
        ctx.eps = eps
        ctx.whole = len(carriers) > 0
        return out

    @staticmethod
    def backward(ctx, grad):
        z, bias, *weights_and_stats = ctx.saved_tensors
        grad_z, grad_bias, *grads = gated_norm_backward(
            grad, z, bias, *weights_and_stats, *ctx.eps, True, not ctx.whole
        )
        grad_bias = grad_bias if bias is not None else None
        unread = (None,) * 6
        if ctx.whole:
            return grad_z, grad_bias, None, None, None, None, *unread, grad, z, *weights_and_stats[4:]
        return grad_z, grad_bias, *grads, *unread


CARRIERS = 6


class Whole(Function):
    """Takes the norm weights' gradients once, over all chunks.

    The forward returns six carriers a chunk, of no content and no memory (expanded zeros), that `gated_norm` takes. In
    backward each chunk hands its output gradient, its z and its statistics back as the carriers' gradients, and the
    sum over rows is taken here, by the reduction over all of them that eager would run.
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
        _, _, *grads = gated_norm_backward(grad, z, bias, *weights, *stats, *ctx.eps, False, True)
        return None, *grads, *[None] * 9


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


def gated_norm(
    z_lnf: torch.Tensor,
    bias: torch.Tensor | None,
    norms: Norms,
    eps: tuple[float, float],
    carriers: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """LN_x(U) * silu(LN_gate(G)) of (U,G) = z + bias, rounded as eager rounds: [l,n,2H] -> [l,n,H]."""
    return _GatedNorm.apply(z_lnf, bias, *norms.collecting, *norms.weights, *eps, *carriers)
