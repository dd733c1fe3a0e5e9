"""The backward of bias + LN(U) * silu(LN(G)) in two passes over its operands, on CUDA.

With u, g the halves of z + bias, x = (u - mean) rstd and n = x gamma + beta for each half, s = sigmoid(n_gate):

    h       = n_x n_gate s                            the forward's result, which the weight gradient needs again
    dn_x    = dh n_gate s
    dn_gate = dh n_x s (1 + n_gate (1 - s))
    du      = rstd (w - mean(w) - x mean(w x)),  w = dn gamma      (LayerNorm's backward, each half)
    dgamma  = sum over rows of dn x,  dbeta = sum of dn,  dbias = sum of (du, dg)

The first kernel takes the row sums that `mean` asks for, four rows a program, and leaves what the second needs of a row:
x = rstd z + shift and du = rstd w + slope z + offset. The second has a tile of columns for all rows of one token: it
writes dz and h, and keeps the column sums in registers, so that no pass over dz follows and no atomics are needed.
Traffic is 9 H values a row: three read twice, three written. All arithmetic is in fp32.

To read them once, a team of programs would share a row: each keeps its columns' sums and tells the others its part of
the row's. That was tried, and takes 1.7 ms where this takes 1.16: what a program must keep until it has heard leaves
room for eight warps on an SM, too few to hide the exchange.
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

# Fastest of twelve and of seven on an H200, at 32 tokens of 1,024 rows and H = 7680: 0.38 and 0.78 ms.
_SUMMED_ROWS, _SUMMED_COLUMNS, _SUMMED_WARPS, _SUMMED_STAGES = 4, 256, 1, 3
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
    factors = z.new_empty((length * rows, 8), dtype=torch.float32)
    dbias = z.new_empty((length, 2 * hidden), dtype=torch.float32)
    partial = z.new_empty((length, 4, hidden), dtype=torch.float32)
    operands = (
        grad, z, z if bias is None else bias.contiguous(),
        gamma_x.contiguous(), beta_x.contiguous(), gamma_gate.contiguous(), beta_gate.contiguous(),
    )  # fmt: skip
    statistics = (each.contiguous() for each in (mean_x, rstd_x, mean_gate, rstd_gate))
    for_rows, for_columns = _launches(length, rows, hidden, bias is not None, rounded, z.dtype, z.device)
    for_rows(*operands, *statistics, factors)
    for_columns(*operands, factors, dz, h, dbias, partial)
    return dz, h, dbias, partial.sum(0)


@functools.lru_cache(maxsize=1024)
def _launches(length, rows, hidden, has_bias, rounded, dtype, device) -> tuple[Launch, Launch]:
    shared = {"H": hidden, "HAS_BIAS": has_bias, "ROUNDED": rounded}
    summed = {"ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS, "STAGES": _SUMMED_STAGES, "num_warps": _SUMMED_WARPS}
    tile = {"COLUMNS": _TILE_COLUMNS, "num_warps": _TILE_WARPS}
    return (
        Launch(_row_sums, (triton.cdiv(rows, _SUMMED_ROWS), length), (rows,), **shared, **summed),
        Launch(_columns, (triton.cdiv(hidden, _TILE_COLUMNS), length), (rows,), **shared, **tile),
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

    # Likewise; the compiler would take the upper value out of its word and shift it back.
    _WIDEN_BF16: tl.constexpr = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000; }")

    @triton.jit
    def _wide(values):
        if values.dtype == tl.bfloat16:
            values = tl.inline_asm_elementwise(_WIDEN_BF16, "=r,=r,r", [values], tl.float32, is_pure=True, pack=2)
        return values.to(tl.float32)

    @triton.jit
    def _biased(z, bias, like, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
        """z + bias in fp32."""
        z = _wide(z)
        if HAS_BIAS:
            z += bias
            if ROUNDED:
                if like.dtype.element_ty == tl.bfloat16:
                    z = tl.inline_asm_elementwise(_ROUND_BF16, "=r,=r,r,r", [z], tl.float32, is_pure=True, pack=2)
                else:
                    z = z.to(like.dtype.element_ty).to(tl.float32)
        return z

    @triton.jit
    def _gate_grads(grad, n_x, n_gate):
        s = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [n_gate], tl.float32, is_pure=True, pack=1)
        silu = n_gate * s
        return n_x * silu, grad * silu, grad * n_x * (s + silu * (1.0 - s))

    @triton.jit
    def _ahead(z_ptr, grad_ptr, factors_ptr, row, last, columns, inside, H: tl.constexpr):
        """A row's operands; after the last row that one's. Nothing replaces what lies outside: that would wait for the loads."""
        row = tl.minimum(row, last)
        u = tl.load(z_ptr + row * 2 * H + columns, inside)
        g = tl.load(z_ptr + row * 2 * H + H + columns, inside)
        grad = tl.load(grad_ptr + row * H + columns, inside)
        of_row = factors_ptr + row * 8
        rstd_x, shift_x = tl.load(of_row), tl.load(of_row + 1)
        slope_x, offset_x = tl.load(of_row + 2), tl.load(of_row + 3)
        rstd_gate, shift_gate = tl.load(of_row + 4), tl.load(of_row + 5)
        slope_gate, offset_gate = tl.load(of_row + 6), tl.load(of_row + 7)
        return u, g, grad, rstd_x, shift_x, slope_x, offset_x, rstd_gate, shift_gate, slope_gate, offset_gate

    @triton.jit
    def _one_row(
        u, g, grad, rstd_x, shift_x, slope_x, offset_x, rstd_gate, shift_gate, slope_gate, offset_gate,
        gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g,
        dz_ptr, h_ptr, row, known, columns, inside, H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr,
    ):  # fmt: skip
        u, g = _biased(u, bias_u, dz_ptr, HAS_BIAS, ROUNDED), _biased(g, bias_g, dz_ptr, HAS_BIAS, ROUNDED)
        x, x_gate = u * rstd_x + shift_x, g * rstd_gate + shift_gate
        h, dn_x, dn_gate = _gate_grads(_wide(grad), x * gamma_x + beta_x, x_gate * gamma_gate + beta_gate)
        du = dn_x * gamma_x * rstd_x + (u * slope_x + offset_x)
        dg = dn_gate * gamma_gate * rstd_gate + (g * slope_gate + offset_gate)
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
        gamma = _wide(tl.load(gamma_ptr + columns, inside, 0.0))
        beta = _wide(tl.load(beta_ptr + columns, inside, 0.0))
        bias = beta
        if HAS_BIAS:
            bias = _wide(tl.load(bias_ptr + place + columns, inside, 0.0))
        return gamma, beta, bias

    @triton.jit
    def _by_eights(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """Sums of eight neighbours: what a thread has of a row."""
        return tl.sum(tl.reshape(values, [ROWS, COLUMNS // 8, 8]), 2)

    @triton.jit
    def _row_sums(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr,
        mean_x_ptr, rstd_x_ptr, mean_gate_ptr, rstd_gate_ptr, factors_ptr, rows,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(1).to(tl.int64)
        local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        known, row = local < rows, token * rows + local
        mean_x, rstd_x = tl.load(mean_x_ptr + row, known, 0.0), tl.load(rstd_x_ptr + row, known, 0.0)
        mean_gate, rstd_gate = tl.load(mean_gate_ptr + row, known, 0.0), tl.load(rstd_gate_ptr + row, known, 0.0)
        shift_x, shift_gate = -mean_x * rstd_x, -mean_gate * rstd_gate
        w_x_sum = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
        wx_x_sum, w_gate_sum, wx_gate_sum = w_x_sum, w_x_sum, w_x_sum
        for begin in tl.range(0, H, COLUMNS, num_stages=STAGES):
            columns = (begin + tl.arange(0, COLUMNS))[None, :]
            inside = columns < H
            taken = inside & known[:, None]
            u = tl.load(z_ptr + row[:, None] * 2 * H + columns, taken, 0.0)
            g = tl.load(z_ptr + row[:, None] * 2 * H + H + columns, taken, 0.0)
            grad = tl.load(grad_ptr + row[:, None] * H + columns, taken, 0.0)
            gamma_x, beta_x, bias_u = _weights(gamma_x_ptr, beta_x_ptr, bias_ptr, token * 2 * H, columns, inside, HAS_BIAS)
            gamma_gate, beta_gate, bias_g = _weights(
                gamma_gate_ptr, beta_gate_ptr, bias_ptr, token * 2 * H + H, columns, inside, HAS_BIAS
            )
            u, g = _biased(u, bias_u, z_ptr, HAS_BIAS, ROUNDED), _biased(g, bias_g, z_ptr, HAS_BIAS, ROUNDED)
            x, x_gate = u * rstd_x[:, None] + shift_x[:, None], g * rstd_gate[:, None] + shift_gate[:, None]
            _, dn_x, dn_gate = _gate_grads(_wide(grad), x * gamma_x + beta_x, x_gate * gamma_gate + beta_gate)
            w_x, w_gate = dn_x * gamma_x, dn_gate * gamma_gate
            w_x_sum += _by_eights(w_x, ROWS, COLUMNS)
            wx_x_sum += _by_eights(w_x * x, ROWS, COLUMNS)
            w_gate_sum += _by_eights(w_gate, ROWS, COLUMNS)
            wx_gate_sum += _by_eights(w_gate * x_gate, ROWS, COLUMNS)
        w_x, wx_x = tl.sum(w_x_sum, 1) / H, tl.sum(wx_x_sum, 1) / H
        w_gate, wx_gate = tl.sum(w_gate_sum, 1) / H, tl.sum(wx_gate_sum, 1) / H
        of_row = factors_ptr + row * 8
        tl.store(of_row, rstd_x, known)
        tl.store(of_row + 1, shift_x, known)
        tl.store(of_row + 2, -wx_x * rstd_x * rstd_x, known)
        tl.store(of_row + 3, -(w_x + wx_x * shift_x) * rstd_x, known)
        tl.store(of_row + 4, rstd_gate, known)
        tl.store(of_row + 5, shift_gate, known)
        tl.store(of_row + 6, -wx_gate * rstd_gate * rstd_gate, known)
        tl.store(of_row + 7, -(w_gate + wx_gate * shift_gate) * rstd_gate, known)

    @triton.jit
    def _columns(
        grad_ptr, z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr, factors_ptr,
        dz_ptr, h_ptr, dbias_ptr, partial_ptr, rows,
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
        u0, g0, grad0, rstd_x0, shift_x0, slope_x0, offset_x0, rstd_gate0, shift_gate0, slope_gate0, offset_gate0 = _ahead(
            z_ptr, grad_ptr, factors_ptr, row, last, columns, inside, H
        )  # fmt: skip
        u1, g1, grad1, rstd_x1, shift_x1, slope_x1, offset_x1, rstd_gate1, shift_gate1, slope_gate1, offset_gate1 = _ahead(
            z_ptr, grad_ptr, factors_ptr, row + 1, last, columns, inside, H
        )  # fmt: skip
        u2, g2, grad2, rstd_x2, shift_x2, slope_x2, offset_x2, rstd_gate2, shift_gate2, slope_gate2, offset_gate2 = _ahead(
            z_ptr, grad_ptr, factors_ptr, row + 2, last, columns, inside, H
        )  # fmt: skip
        for begin in range(0, rows, 3):
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u0, g0, grad0, rstd_x0, shift_x0, slope_x0, offset_x0, rstd_gate0, shift_gate0, slope_gate0, offset_gate0,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row, True, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u0, g0, grad0, rstd_x0, shift_x0, slope_x0, offset_x0, rstd_gate0, shift_gate0, slope_gate0, offset_gate0 = _ahead(
                z_ptr, grad_ptr, factors_ptr, row + 3, last, columns, inside, H
            )  # fmt: skip
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u1, g1, grad1, rstd_x1, shift_x1, slope_x1, offset_x1, rstd_gate1, shift_gate1, slope_gate1, offset_gate1,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row + 1, begin + 1 < rows, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u1, g1, grad1, rstd_x1, shift_x1, slope_x1, offset_x1, rstd_gate1, shift_gate1, slope_gate1, offset_gate1 = _ahead(
                z_ptr, grad_ptr, factors_ptr, row + 4, last, columns, inside, H
            )  # fmt: skip
            dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u, dbias_g = _one_row(
                u2, g2, grad2, rstd_x2, shift_x2, slope_x2, offset_x2, rstd_gate2, shift_gate2, slope_gate2, offset_gate2,
                gamma_x, beta_x, bias_u, gamma_gate, beta_gate, bias_g, dgamma_x, dbeta_x, dgamma_gate, dbeta_gate, dbias_u,
                dbias_g, dz_ptr, h_ptr, row + 2, begin + 2 < rows, columns, inside, H, HAS_BIAS, ROUNDED,
            )  # fmt: skip
            u2, g2, grad2, rstd_x2, shift_x2, slope_x2, offset_x2, rstd_gate2, shift_gate2, slope_gate2, offset_gate2 = _ahead(
                z_ptr, grad_ptr, factors_ptr, row + 5, last, columns, inside, H
            )  # fmt: skip
            row += 3
        tl.store(dbias_ptr + token * 2 * H + columns, dbias_u, inside)
        tl.store(dbias_ptr + token * 2 * H + H + columns, dbias_g, inside)
        partial_ptr += token * 4 * H
        tl.store(partial_ptr + columns, dgamma_x, inside)
        tl.store(partial_ptr + H + columns, dbeta_x, inside)
        tl.store(partial_ptr + 2 * H + columns, dgamma_gate, inside)
        tl.store(partial_ptr + 3 * H + columns, dbeta_gate, inside)
