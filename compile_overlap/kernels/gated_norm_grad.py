"""The backward of bias + LN(U) * silu(LN(G)) in two passes over its operands, on CUDA.

With u, g the halves of z + bias, x = (u - mean) rstd and n = x gamma + beta for each half, s = sigmoid(n_gate):

    h       = n_x n_gate s                            the forward's result, which the weight gradient needs again
    dn_x    = dh n_gate s
    dn_gate = dh n_x s (1 + n_gate (1 - s))
    du      = rstd (w - mean(w) - x mean(w x)),  w = dn gamma      (LayerNorm's backward, each half)
    dgamma  = sum over rows of dn x,  dbeta = sum of dn,  dbias = sum of (du, dg)

The first kernel takes the row sums that `mean` asks for, one program a row. The second has a tile of columns for all
rows of one token: it writes dz and h, and keeps the column sums in registers, so that no pass over dz follows and no
atomics are needed. Traffic is 9 H values a row: three read twice, three written. All arithmetic is in fp32.
"""

from __future__ import annotations

import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from ..operators import fake_of, operator
from .launch import Launch

# Fastest of seven and of seventeen on an H200, at 32 tokens of 1,024 rows and H = 7680: 0.54 and 0.92 ms.
_ROW_BLOCK, _ROW_WARPS = 512, 2
_TILE_ROWS, _TILE_COLUMNS, _TILE_WARPS = 1, 512, 4


def takes(z: torch.Tensor) -> bool:
    """Whether the kernels compute this z [l,n,2H]: Triton, CUDA, a floating type of at most four bytes."""
    return triton is not None and z.is_cuda and z.dtype in (torch.bfloat16, torch.float16, torch.float32)


@operator
def gated_norm_grad(
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
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From grad [l,n,H], z [l,n,2H], bias [l,2H] and the norms' weights [H] and statistics [l,n,1] in fp32:

    dz [l,n,2H] and h [l,n,H] in z's dtype, dbias [l,2H] in fp32, and dgamma_x, dbeta_x, dgamma_gate, dbeta_gate [4,H]
    in fp32. `rounded`: the forward rounded z + bias to z's dtype.
    """
    length, rows, hidden = grad.shape
    grad, z = grad.contiguous(), z.contiguous()
    dz, h = torch.empty_like(z), torch.empty_like(grad)
    sums = z.new_empty((4, length * rows), dtype=torch.float32)
    dbias = z.new_empty((length, 2 * hidden), dtype=torch.float32)
    partial = z.new_empty((length, 4, hidden), dtype=torch.float32)
    operands = (
        grad, z, z if bias is None else bias.contiguous(),
        gamma_x.contiguous(), beta_x.contiguous(), gamma_gate.contiguous(), beta_gate.contiguous(),
        mean_x.contiguous(), rstd_x.contiguous(), mean_gate.contiguous(), rstd_gate.contiguous(),
    )  # fmt: skip
    for_rows, for_columns = _launches(length, rows, hidden, bias is not None, rounded, z.dtype, z.device)
    for_rows(*operands, sums)
    for_columns(*operands, sums, dz, h, dbias, partial)
    return dz, h, dbias, partial.sum(0)


@functools.lru_cache(maxsize=1024)
def _launches(length, rows, hidden, has_bias, rounded, dtype, device) -> tuple[Launch, Launch]:
    shared = {"H": hidden, "HAS_BIAS": has_bias, "ROUNDED": rounded}
    block = min(_ROW_BLOCK, triton.next_power_of_2(hidden))
    grid = triton.cdiv(hidden, _TILE_COLUMNS), length
    tile = {"ROWS": _TILE_ROWS, "COLUMNS": _TILE_COLUMNS, "num_warps": _TILE_WARPS}
    numbers = rows, length * rows
    return (
        Launch(_row_sums, (length * rows,), numbers, **shared, BLOCK=block, num_warps=_ROW_WARPS),
        Launch(_columns, grid, numbers, **shared, **tile),
    )


@fake_of(gated_norm_grad)
def _(grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, rounded):
    length, _, hidden = grad.shape
    single = torch.float32
    dbias = z.new_empty((length, 2 * hidden), dtype=single)
    return z.new_empty(z.shape), z.new_empty(grad.shape), dbias, z.new_empty((4, hidden), dtype=single)


if triton is not None:

    @triton.jit
    def _normed(z, bias, mean, rstd, gamma, beta, like, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
        if HAS_BIAS:
            z += bias
            if ROUNDED:
                z = z.to(like.dtype.element_ty).to(tl.float32)
        x = (z - mean) * rstd
        return x, x * gamma + beta

    @triton.jit
    def _gate_grads(grad, n_x, n_gate):
        s = tl.sigmoid(n_gate)
        silu = n_gate * s
        return n_x * silu, grad * silu, grad * n_x * (s + silu * (1.0 - s))

    @triton.jit
    def _tile(z_ptr, grad_ptr, token, local, rows, columns, inside, H: tl.constexpr):
        mask = (local < rows)[:, None] & inside[None, :]
        row = (token * rows + local)[:, None]
        u = tl.load(z_ptr + row * 2 * H + columns[None, :], mask, 0.0)
        g = tl.load(z_ptr + row * 2 * H + H + columns[None, :], mask, 0.0)
        return u, g, tl.load(grad_ptr + row * H + columns[None, :], mask, 0.0)

    @triton.jit
    def _row_sums(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr,
        mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, rows, total_rows,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        token = row // rows
        mean_x, rstd_x = tl.load(mean_x_ptr + row), tl.load(rstd_x_ptr + row)
        mean_gate, rstd_gate = tl.load(mean_gate_ptr + row), tl.load(rstd_gate_ptr + row)
        w_x_sum = tl.zeros([BLOCK], tl.float32)
        wx_x_sum = tl.zeros([BLOCK], tl.float32)
        w_gate_sum = tl.zeros([BLOCK], tl.float32)
        wx_gate_sum = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, H, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            inside = columns < H
            u = tl.load(z_ptr + row * 2 * H + columns, inside, 0.0).to(tl.float32)
            g = tl.load(z_ptr + row * 2 * H + H + columns, inside, 0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * H + columns, inside, 0.0).to(tl.float32)
            bias_u, bias_g = 0.0, 0.0
            if HAS_BIAS:
                bias_u = tl.load(bias_ptr + token * 2 * H + columns, inside, 0.0).to(tl.float32)
                bias_g = tl.load(bias_ptr + token * 2 * H + H + columns, inside, 0.0).to(tl.float32)
            gamma_x = tl.load(gamma_x_ptr + columns, inside, 0.0).to(tl.float32)
            beta_x = tl.load(beta_x_ptr + columns, inside, 0.0).to(tl.float32)
            gamma_gate = tl.load(gamma_gate_ptr + columns, inside, 0.0).to(tl.float32)
            beta_gate = tl.load(beta_gate_ptr + columns, inside, 0.0).to(tl.float32)
            x, n_x = _normed(u, bias_u, mean_x, rstd_x, gamma_x, beta_x, z_ptr, HAS_BIAS, ROUNDED)
            x_gate, n_gate = _normed(g, bias_g, mean_gate, rstd_gate, gamma_gate, beta_gate, z_ptr, HAS_BIAS, ROUNDED)
            h, dn_x, dn_gate = _gate_grads(grad, n_x, n_gate)
            w_x, w_gate = dn_x * gamma_x, dn_gate * gamma_gate
            w_x_sum += w_x
            wx_x_sum += w_x * x
            w_gate_sum += w_gate
            wx_gate_sum += w_gate * x_gate
        tl.store(sums_ptr + row, tl.sum(w_x_sum) / H)
        tl.store(sums_ptr + total_rows + row, tl.sum(wx_x_sum) / H)
        tl.store(sums_ptr + 2 * total_rows + row, tl.sum(w_gate_sum) / H)
        tl.store(sums_ptr + 3 * total_rows + row, tl.sum(wx_gate_sum) / H)

    @triton.jit
    def _columns(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr,
        mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, dz_ptr, h_ptr, dbias_ptr, partial_ptr,
        rows, total_rows,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(1).to(tl.int64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < H
        gamma_x = tl.load(gamma_x_ptr + columns, inside, 0.0).to(tl.float32)[None, :]
        beta_x = tl.load(beta_x_ptr + columns, inside, 0.0).to(tl.float32)[None, :]
        gamma_gate = tl.load(gamma_gate_ptr + columns, inside, 0.0).to(tl.float32)[None, :]
        beta_gate = tl.load(beta_gate_ptr + columns, inside, 0.0).to(tl.float32)[None, :]
        bias_u = tl.zeros([1, COLUMNS], tl.float32)
        bias_g = tl.zeros([1, COLUMNS], tl.float32)
        if HAS_BIAS:
            bias_u = tl.load(bias_ptr + token * 2 * H + columns, inside, 0.0).to(tl.float32)[None, :]
            bias_g = tl.load(bias_ptr + token * 2 * H + H + columns, inside, 0.0).to(tl.float32)[None, :]
        dgamma_x = tl.zeros([ROWS, COLUMNS], tl.float32)
        dbeta_x = tl.zeros([ROWS, COLUMNS], tl.float32)
        dgamma_gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        dbeta_gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        dbias_u = tl.zeros([ROWS, COLUMNS], tl.float32)
        dbias_g = tl.zeros([ROWS, COLUMNS], tl.float32)
        first = tl.arange(0, ROWS)
        next_u, next_g, next_grad = _tile(z_ptr, grad_ptr, token, first, rows, columns, inside, H)
        for begin in range(0, rows, ROWS):
            # The next tile is loaded while this one is computed.
            u, g, grad = next_u.to(tl.float32), next_g.to(tl.float32), next_grad.to(tl.float32)
            local = begin + first
            next_u, next_g, next_grad = _tile(z_ptr, grad_ptr, token, local + ROWS, rows, columns, inside, H)
            known = local < rows
            row = token * rows + local
            mask = known[:, None] & inside[None, :]
            mean_x = tl.load(mean_x_ptr + row, known, 0.0)[:, None]
            rstd_x = tl.load(rstd_x_ptr + row, known, 0.0)[:, None]
            mean_gate = tl.load(mean_gate_ptr + row, known, 0.0)[:, None]
            rstd_gate = tl.load(rstd_gate_ptr + row, known, 0.0)[:, None]
            w_x_mean = tl.load(sums_ptr + row, known, 0.0)[:, None]
            wx_x_mean = tl.load(sums_ptr + total_rows + row, known, 0.0)[:, None]
            w_gate_mean = tl.load(sums_ptr + 2 * total_rows + row, known, 0.0)[:, None]
            wx_gate_mean = tl.load(sums_ptr + 3 * total_rows + row, known, 0.0)[:, None]
            wide = row[:, None] * 2 * H + columns[None, :]
            narrow = row[:, None] * H + columns[None, :]
            x, n_x = _normed(u, bias_u, mean_x, rstd_x, gamma_x, beta_x, z_ptr, HAS_BIAS, ROUNDED)
            x_gate, n_gate = _normed(g, bias_g, mean_gate, rstd_gate, gamma_gate, beta_gate, z_ptr, HAS_BIAS, ROUNDED)
            h, dn_x, dn_gate = _gate_grads(grad, n_x, n_gate)
            du = rstd_x * (dn_x * gamma_x - w_x_mean - x * wx_x_mean)
            dg = rstd_gate * (dn_gate * gamma_gate - w_gate_mean - x_gate * wx_gate_mean)
            tl.store(h_ptr + narrow, h.to(h_ptr.dtype.element_ty), mask)
            tl.store(dz_ptr + wide, du.to(dz_ptr.dtype.element_ty), mask)
            tl.store(dz_ptr + wide + H, dg.to(dz_ptr.dtype.element_ty), mask)
            dgamma_x += dn_x * x
            dbeta_x += dn_x
            dgamma_gate += dn_gate * x_gate
            dbeta_gate += dn_gate
            dbias_u += tl.where(known[:, None], du, 0.0)
            dbias_g += tl.where(known[:, None], dg, 0.0)
        tl.store(dbias_ptr + token * 2 * H + columns, tl.sum(dbias_u, 0), inside)
        tl.store(dbias_ptr + token * 2 * H + H + columns, tl.sum(dbias_g, 0), inside)
        tl.store(partial_ptr + token * 4 * H + columns, tl.sum(dgamma_x, 0), inside)
        tl.store(partial_ptr + token * 4 * H + H + columns, tl.sum(dbeta_x, 0), inside)
        tl.store(partial_ptr + token * 4 * H + 2 * H + columns, tl.sum(dgamma_gate, 0), inside)
        tl.store(partial_ptr + token * 4 * H + 3 * H + columns, tl.sum(dbeta_gate, 0), inside)
