"""`eager_exact`: operators that round exactly where eager PyTorch rounds, forward and backward.

They are opaque to Inductor, which would otherwise fuse the roundings away. The forward of `gated_norm` is ATen's own
sequence, or on CUDA the Triton kernel that reproduces it bit for bit in one pass; only the row statistics are saved, so
backward recomputes the rest. Backward is ATen's own sequence: input, weight and bias gradients equal eager autograd's.
"""

from __future__ import annotations

import torch
from torch.autograd import Function

from ..kernels import exact_gated_norm as kernel

aten = torch.ops.aten


def _stat_dtype(z: torch.Tensor) -> torch.dtype:
    return torch.float32 if z.is_cuda else z.dtype


def _biased_halves(z: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    z = z if bias is None else z + bias.unsqueeze(1)
    return z.chunk(2, dim=-1)


@torch.library.custom_op("compile_overlap::gated_norm", mutates_args=())
def gated_norm_op(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    gamma_x: torch.Tensor,
    beta_x: torch.Tensor,
    gamma_gate: torch.Tensor,
    beta_gate: torch.Tensor,
    eps_x: float,
    eps_gate: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """LN_x(U) * silu(LN_gate(G)) of (U,G) = z [l,n,2H] + bias [l,2H]; norm weights [H] in fp32.

    Returns the product [l,n,H] and mean and reciprocal standard deviation of U and of G, each [l,n,1].
    """
    if kernel.takes(z):
        return kernel.forward(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate)
    u, g = _biased_halves(z, bias)
    hidden = [u.shape[-1]]
    normed, mean_x, rstd_x = aten.native_layer_norm(u, hidden, gamma_x.to(z.dtype), beta_x.to(z.dtype), eps_x)
    gate, mean_g, rstd_g = aten.native_layer_norm(g, hidden, gamma_gate.to(z.dtype), beta_gate.to(z.dtype), eps_gate)
    return normed * aten.silu(gate), mean_x, rstd_x, mean_g, rstd_g


@gated_norm_op.register_fake
def _(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate):
    length, rows, twice_hidden = z.shape
    stats = [z.new_empty((length, rows, 1), dtype=_stat_dtype(z)) for _ in range(4)]
    return (z.new_empty((length, rows, twice_hidden // 2)), *stats)


@torch.library.custom_op("compile_overlap::gated_norm_backward", mutates_args=())
def gated_norm_backward_op(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of z [l,n,2H], bias [l,2H] and the four norm weights [H] (fp32), by eager autograd's own ATen calls."""
    u, g = _biased_halves(z, bias)
    hidden, all_three = [u.shape[-1]], [True, True, True]
    weights_x = gamma_x.to(z.dtype), beta_x.to(z.dtype)
    weights_gate = gamma_gate.to(z.dtype), beta_gate.to(z.dtype)
    normed = aten.native_layer_norm(u, hidden, *weights_x, eps_x)[0]
    gate = aten.native_layer_norm(g, hidden, *weights_gate, eps_gate)[0]
    grad_normed = grad * aten.silu(gate)
    grad_gate = aten.silu_backward(grad * normed, gate)
    grad_u, *grads_x = aten.native_layer_norm_backward(grad_normed, u, hidden, mean_x, rstd_x, *weights_x, all_three)
    grad_g, *grads_gate = aten.native_layer_norm_backward(
        grad_gate, g, hidden, mean_gate, rstd_gate, *weights_gate, all_three
    )
    grad_z = torch.cat((grad_u, grad_g), dim=-1)
    grad_bias = grad_z.sum(1) if bias is not None else z.new_empty(0)
    return (grad_z, grad_bias, *(t.float() for t in (*grads_x, *grads_gate)))


@gated_norm_backward_op.register_fake
def _(grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, eps_x, eps_gate):
    grad_bias = z.new_empty(0) if bias is None else torch.empty_like(bias)
    weights = [torch.empty_like(t) for t in (gamma_x, beta_x, gamma_gate, beta_gate)]
    return (z.new_empty(z.shape), grad_bias, *weights)


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.eps_x, ctx.eps_gate = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx, grad, *_grads_of_statistics):
    grad_z, grad_bias, *grads = gated_norm_backward_op(grad, *ctx.saved_tensors, ctx.eps_x, ctx.eps_gate)
    return (grad_z, grad_bias if ctx.saved_tensors[1] is not None else None, *grads, None, None)


gated_norm_op.register_autograd(_backward, setup_context=_save_for_backward)


@torch.library.custom_op("compile_overlap::row_sum", mutates_args=())
def row_sum_op(grad: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of [l,n,D], as eager's bias gradient: [l,D]."""
    return grad.sum(1)


@row_sum_op.register_fake
def _(grad):
    return grad.new_empty((grad.shape[0], grad.shape[2]))


class _ExpandRows(Function):
    @staticmethod
    def forward(ctx, bias, rows):
        return bias.unsqueeze(1).expand(-1, rows, -1)

    @staticmethod
    def backward(ctx, grad):
        return row_sum_op(grad), None


def expand_rows(bias_ld: torch.Tensor, rows: int) -> torch.Tensor:
    """`bias_ld` [l,D] as a view [l,rows,D] whose gradient is summed by ATen, not by a fused reduction."""
    return _ExpandRows.apply(bias_ld, rows)


def gated_norm(
    z_lnf: torch.Tensor, bias: torch.Tensor | None, norms: tuple[torch.Tensor, ...], eps: tuple[float, float]
) -> torch.Tensor:
    """LN_x(U) * silu(LN_gate(G)) of (U,G) = z + bias, rounded as eager rounds: [l,n,2H] -> [l,n,H]."""
    return gated_norm_op(z_lnf, bias, *norms, *eps)[0]
