"""The backward of bias + LN(U) * silu(LN(G)) in two passes over its operands, on CUDA.

With u, g the halves of z + bias, x = (u - mean) rstd and n = x gamma + beta for each half, s = sigmoid(n_gate):

    h       = n_x n_gate s                            the forward's result, which the weight gradient needs again
    dn_x    = dh n_gate s
    dn_gate = dh n_x s (1 + n_gate (1 - s))
    du      = rstd (w - mean(w) - x mean(w x)),  w = dn gamma      (LayerNorm's backward, each half)
    dgamma  = sum over rows of dn x,  dbeta = sum of dn,  dbias = sum of (du, dg)

The first kernel takes the row sums that `mean` asks for, two rows a program. The second has a tile of columns for all
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

# Fastest of nine and of sixteen on an H200, at 32 tokens of 1,024 rows and H = 7680: 0.43 and 0.81 ms.
_SUMMED_ROWS, _SUMMED_COLUMNS, _SUMMED_WARPS = 2, 512, 2
_TILE_COLUMNS, _TILE_WARPS = 256, 2


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
    lanes = min(_SUMMED_COLUMNS, triton.next_power_of_2(hidden)) // 8
    summed = {"ROWS": _SUMMED_ROWS, "LANES": max(lanes, 1), "num_warps": _SUMMED_WARPS}
    tile = {"COLUMNS": _TILE_COLUMNS, "num_warps": _TILE_WARPS}
    numbers = rows, length * rows
    return (
        Launch(_row_sums, (triton.cdiv(rows, _SUMMED_ROWS), length), numbers, **shared, **summed),
        Launch(_columns, (triton.cdiv(hidden, _TILE_COLUMNS), length), numbers, **shared, **tile),
    )


@fake_of(gated_norm_grad)
def _(grad, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, rounded):
    length, _, hidden = grad.shape
    single = torch.float32
    dbias = z.new_empty((length, 2 * hidden), dtype=single)
    return z.new_empty(z.shape), z.new_empty(grad.shape), dbias, z.new_empty((4, hidden), dtype=single)


if triton is not None:

    # 1 / (1 + 2^(-n log2(e))), without the cases of denormals and of large divisors.
    _SIGMOID: tl.constexpr = tl.constexpr(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, e; }"
    )
    # Two values at once: a conversion of one takes the unit that exponentials and reciprocals need.
    _ROUND_BF16: tl.constexpr = tl.constexpr(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xFFFF0000; }"
    )

    @triton.jit
    def _normed(z, bias, mean, rstd, gamma, beta, like, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
        if HAS_BIAS:
            z += bias
            if ROUNDED:
                if like.dtype.element_ty == tl.bfloat16:
                    z = tl.inline_asm_elementwise(_ROUND_BF16, "=r,=r,r,r", [z], tl.float32, is_pure=True, pack=2)
                else:
                    z = z.to(like.dtype.element_ty).to(tl.float32)
        x = (z - mean) * rstd
        return x, x * gamma + beta

    @triton.jit
    def _gate_grads(grad, n_x, n_gate):
        s = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [n_gate], tl.float32, is_pure=True, pack=1)
        silu = n_gate * s
        return n_x * silu, grad * silu, grad * n_x * (s + silu * (1.0 - s))

    @triton.jit
    def _tile(z_ptr, grad_ptr, row, columns, mask, H: tl.constexpr):
        u = tl.load(z_ptr + row * 2 * H + columns, mask, 0.0)
        g = tl.load(z_ptr + row * 2 * H + H + columns, mask, 0.0)
        return u, g, tl.load(grad_ptr + row * H + columns, mask, 0.0)

    @triton.jit
    def _ahead(
        z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row, last, columns,
        inside, H: tl.constexpr,
    ):  # fmt: skip
        """A row's operands; after the last row that one's. Nothing replaces what lies outside: that would wait for the loads."""
        row = tl.minimum(row, last)
        u = tl.load(z_ptr + row * 2 * H + columns, inside)
        g = tl.load(z_ptr + row * 2 * H + H + columns, inside)
        grad = tl.load(grad_ptr + row * H + columns, inside)
        sums_ptr += row
        w_x_mean, wx_x_mean = tl.load(sums_ptr), tl.load(sums_ptr + total_rows)
        w_gate_mean, wx_gate_mean = tl.load(sums_ptr + 2 * total_rows), tl.load(sums_ptr + 3 * total_rows)
        mean_x, rstd_x = tl.load(mean_x_ptr + row), tl.load(rstd_x_ptr + row)
        mean_gate, rstd_gate = tl.load(mean_gate_ptr + row), tl.load(rstd_gate_ptr + row)
        return u, g, grad, mean_x, rstd_x, w_x_mean, wx_x_mean, mean_gate, rstd_gate, w_gate_mean, wx_gate_mean

    @triton.jit
    def _one_row(
        u, g, grad, mean_x, rstd_x, w_x_mean, wx_x_mean, mean_gate, rstd_gate, w_gate_mean, wx_gate_mean,
        gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g,
        dz_ptr, h_ptr, row, known, columns, inside, H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr,
    ):  # fmt: skip
        u, g, grad = u.to(tl.float32), g.to(tl.float32), grad.to(tl.float32)
        x, n_x = _normed(u, bias_u, mean_x, rstd_x, gamma_x, beta_x, dz_ptr, HAS_BIAS, ROUNDED)
        x_gate, n_gate = _normed(g, bias_g, mean_gate, rstd_gate, gamma_gate, beta_gate, dz_ptr, HAS_BIAS, ROUNDED)
        h, dn_x, dn_gate = _gate_grads(grad, n_x, n_gate)
        du = rstd_x * (dn_x * gamma_x - w_x_mean - x * wx_x_mean)
        dg = rstd_gate * (dn_gate * gamma_gate - w_gate_mean - x_gate * wx_gate_mean)
        if known:
            tl.store(h_ptr + row * H + columns, h.to(h_ptr.dtype.element_ty), inside)
            tl.store(dz_ptr + row * 2 * H + columns, du.to(dz_ptr.dtype.element_ty), inside)
            tl.store(dz_ptr + row * 2 * H + H + columns, dg.to(dz_ptr.dtype.element_ty), inside)
            dgamma_x += dn_x * x
            dbeta_x += dn_x
            dgamma_gate += dn_gate * x_gate
            dbeta_gate += dn_gate
            dbias_u += du
            dbias_g += dg
        return dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g

    @triton.jit
    def _weights(gamma_ptr, beta_ptr, bias_ptr, place, columns, inside, HAS_BIAS: tl.constexpr):
        gamma = tl.load(gamma_ptr + columns, inside, 0.0).to(tl.float32)
        beta = tl.load(beta_ptr + columns, inside, 0.0).to(tl.float32)
        bias = beta
        if HAS_BIAS:
            bias = tl.load(bias_ptr + place + columns, inside, 0.0).to(tl.float32)
        return gamma, beta, bias

    @triton.jit
    def _row_sums(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr,
        mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, rows, total_rows,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(1).to(tl.int64)
        local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        known, row = local < rows, token * rows + local
        # [ROWS,LANES,8]: eight columns to a thread, which sums them before it adds them to what it has.
        rows_of, of_row = row[:, None, None], known[:, None, None]
        lanes = (tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
        mean_x = tl.load(mean_x_ptr + row, known, 0.0)[:, None, None]
        rstd_x = tl.load(rstd_x_ptr + row, known, 0.0)[:, None, None]
        mean_gate = tl.load(mean_gate_ptr + row, known, 0.0)[:, None, None]
        rstd_gate = tl.load(rstd_gate_ptr + row, known, 0.0)[:, None, None]
        w_x_sum = tl.zeros([ROWS, LANES], tl.float32)
        wx_x_sum = tl.zeros([ROWS, LANES], tl.float32)
        w_gate_sum = tl.zeros([ROWS, LANES], tl.float32)
        wx_gate_sum = tl.zeros([ROWS, LANES], tl.float32)
        for begin in range(0, H, 8 * LANES):
            columns = begin + lanes
            inside = columns < H
            u, g, grad = _tile(z_ptr, grad_ptr, rows_of, columns, inside & of_row, H)
            gamma_x, beta_x, bias_u = _weights(gamma_x_ptr, beta_x_ptr, bias_ptr, token * 2 * H, columns, inside, HAS_BIAS)
            gamma_gate, beta_gate, bias_g = _weights(
                gamma_gate_ptr, beta_gate_ptr, bias_ptr, token * 2 * H + H, columns, inside, HAS_BIAS
            )
            x, n_x = _normed(u.to(tl.float32), bias_u, mean_x, rstd_x, gamma_x, beta_x, z_ptr, HAS_BIAS, ROUNDED)
            x_gate, n_gate = _normed(
                g.to(tl.float32), bias_g, mean_gate, rstd_gate, gamma_gate, beta_gate, z_ptr, HAS_BIAS, ROUNDED
            )
            h, dn_x, dn_gate = _gate_grads(grad.to(tl.float32), n_x, n_gate)
            w_x, w_gate = dn_x * gamma_x, dn_gate * gamma_gate
            w_x_sum += tl.sum(w_x, 2)
            wx_x_sum += tl.sum(w_x * x, 2)
            w_gate_sum += tl.sum(w_gate, 2)
            wx_gate_sum += tl.sum(w_gate * x_gate, 2)
        tl.store(sums_ptr + row, tl.sum(w_x_sum, 1) / H, known)
        tl.store(sums_ptr + total_rows + row, tl.sum(wx_x_sum, 1) / H, known)
        tl.store(sums_ptr + 2 * total_rows + row, tl.sum(w_gate_sum, 1) / H, known)
        tl.store(sums_ptr + 3 * total_rows + row, tl.sum(wx_gate_sum, 1) / H, known)

    @triton.jit
    def _columns(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr,
        mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, dz_ptr, h_ptr, dbias_ptr, partial_ptr,
        rows, total_rows,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(1).to(tl.int64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < H
        gamma_x, beta_x, bias_u = _weights(gamma_x_ptr, beta_x_ptr, bias_ptr, token * 2 * H, columns, inside, HAS_BIAS)
        gamma_gate, beta_gate, bias_g = _weights(
            gamma_gate_ptr, beta_gate_ptr, bias_ptr, token * 2 * H + H, columns, inside, HAS_BIAS
        )
        dgamma_x = tl.zeros([COLUMNS], tl.float32)
        dbeta_x = tl.zeros([COLUMNS], tl.float32)
        dgamma_gate = tl.zeros([COLUMNS], tl.float32)
        dbeta_gate = tl.zeros([COLUMNS], tl.float32)
        dbias_u = tl.zeros([COLUMNS], tl.float32)
        dbias_g = tl.zeros([COLUMNS], tl.float32)
        # While one row is computed the next two are on their way. Each has names of its own: to hand one on from name to name
        # would wait for it.
        row, last = token * rows, token * rows + rows - 1
        u0, g0, grad0, mean_x0, rstd_x0, w_x0, wx_x0, mean_gate0, rstd_gate0, w_gate0, wx_gate0 = _ahead(
            z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row, last, columns,
            inside, H,
        )  # fmt: skip
        u1, g1, grad1, mean_x1, rstd_x1, w_x1, wx_x1, mean_gate1, rstd_gate1, w_gate1, wx_gate1 = _ahead(
            z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row + 1, last, columns,
            inside, H,
        )  # fmt: skip
        u2, g2, grad2, mean_x2, rstd_x2, w_x2, wx_x2, mean_gate2, rstd_gate2, w_gate2, wx_gate2 = _ahead(
            z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row + 2, last, columns,
            inside, H,
        )  # fmt: skip
        for begin in range(0, rows, 3):
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u0, g0, grad0, mean_x0, rstd_x0, w_x0, wx_x0, mean_gate0, rstd_gate0, w_gate0, wx_gate0,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row, True, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u0, g0, grad0, mean_x0, rstd_x0, w_x0, wx_x0, mean_gate0, rstd_gate0, w_gate0, wx_gate0 = _ahead(
                z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row + 3, last, columns,
                inside, H,
            )  # fmt: skip
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u1, g1, grad1, mean_x1, rstd_x1, w_x1, wx_x1, mean_gate1, rstd_gate1, w_gate1, wx_gate1,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row + 1, begin + 1 < rows, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u1, g1, grad1, mean_x1, rstd_x1, w_x1, wx_x1, mean_gate1, rstd_gate1, w_gate1, wx_gate1 = _ahead(
                z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row + 4, last, columns,
                inside, H,
            )  # fmt: skip
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u2, g2, grad2, mean_x2, rstd_x2, w_x2, wx_x2, mean_gate2, rstd_gate2, w_gate2, wx_gate2,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row + 2, begin + 2 < rows, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u2, g2, grad2, mean_x2, rstd_x2, w_x2, wx_x2, mean_gate2, rstd_gate2, w_gate2, wx_gate2 = _ahead(
                z_ptr, grad_ptr, mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, sums_ptr, total_rows, row + 5, last, columns,
                inside, H,
            )  # fmt: skip
            row += 3
        tl.store(dbias_ptr + token * 2 * H + columns, dbias_u, inside)
        tl.store(dbias_ptr + token * 2 * H + H + columns, dbias_g, inside)
        partial_ptr += token * 4 * H
        tl.store(partial_ptr + columns, dgamma_x, inside)
        tl.store(partial_ptr + H + columns, dbeta_x, inside)
        tl.store(partial_ptr + 2 * H + columns, dgamma_gate, inside)
        tl.store(partial_ptr + 3 * H + columns, dbeta_gate, inside)
