"""bias + LN(U) * silu(LN(G)) in one pass on Hopper, bit for bit what eager PyTorch computes in bf16.

The statistics follow the order of ATen's vectorised CUDA LayerNorm (aten/src/ATen/native/cuda/layer_norm_kernel.cu):
128 lanes of four elements a step, Welford's update, warp shuffles 16, 8, 4, 2, 1, then warps 2, 1. Everything that
eager stores in bf16 is rounded to bf16: the biased input, both norms, the gate, the product. A sum or product of two
bf16 values rounds the same directly as through fp32, so the bias and the product use packed bf16 arithmetic.

The grid is one program a row; four warps, because the reduction order needs one lane a thread and four warps.
"""

from __future__ import annotations

import functools

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = None

_WARPS = 4
_LANES = 32 * _WARPS
_VECTOR = 4
_BLOCK = 2048
_UNROLL = 15


def takes(z: torch.Tensor) -> bool:
    """Whether the kernel computes this input [l,n,2H]: bf16, SM90, contiguous, H a multiple of four, 8-byte rows."""
    hidden = z.shape[-1] // 2
    usable = triton is not None and z.is_cuda and z.dtype == torch.bfloat16 and z.is_contiguous()
    return usable and _has_packed_bf16(z.device) and hidden % _VECTOR == 0 and z.data_ptr() % (2 * _VECTOR) == 0 and z.numel() > 0


@functools.lru_cache(maxsize=None)
def _has_packed_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache(maxsize=None)
def _reciprocals(steps: int, device: torch.device) -> torch.Tensor:
    """1/(i+1) in fp32, the factor of Welford's update after i elements."""
    return 1.0 / torch.arange(1, steps + 1, dtype=torch.float32).to(device)


def forward(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x: float, eps_gate: float):
    """See `recipes.exact.gated_norm_op`; `takes(z)` must hold. Norm weights [H] in fp32 that bf16 can represent."""
    length, rows, twice_hidden = z.shape
    hidden = twice_hidden // 2
    out = z.new_empty((length, rows, hidden))
    stats = [z.new_empty((length, rows, 1), dtype=torch.float32) for _ in range(4)]
    steps = triton.cdiv(hidden // _VECTOR, _LANES)
    _exact_gated_norm[(length * rows,)](
        z,
        z if bias is None else bias.contiguous(),
        gamma_x,
        beta_x,
        gamma_gate,
        beta_gate,
        out,
        *stats,
        _reciprocals(steps * _VECTOR, z.device),
        rows,
        eps_x,
        eps_gate,
        H=hidden,
        HAS_BIAS=bias is not None,
        STEPS=steps,
        UNROLL=min(steps, _UNROLL),
        BLOCK=min(_BLOCK, triton.next_power_of_2(hidden)),
        num_warps=_WARPS,
    )
    return (out, *stats)


if triton is not None:

    @triton.jit
    def _welford_combine(mean_b, m2_b, count_b, mean_a, m2_a, count_a):
        delta = mean_b - mean_a
        count = count_a + count_b
        inverse = tl.math.div_rn(1.0 + tl.zeros_like(count), tl.where(count > 0, count, 1.0))
        share_a = count_a * inverse
        share_b = count_b * inverse
        mean = tl.math.fma(share_a, mean_a, share_b * mean_b)
        m2 = tl.math.fma(delta * delta * count_a, share_b, m2_a + m2_b)
        some = count > 0
        return tl.where(some, mean, 0.0), tl.where(some, m2, 0.0), count

    @triton.jit
    def _welford_update(x, mean, m2, inverse):
        delta = x - mean
        new_mean = tl.math.fma(delta, inverse, mean)
        return new_mean, tl.math.fma(delta, x - new_mean, m2)

    @triton.jit
    def _add_bf16x2(a, b):
        return tl.inline_asm_elementwise("add.rn.bf16x2 $0,$1,$2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def _mul_bf16x2(a, b):
        return tl.inline_asm_elementwise("mul.rn.bf16x2 $0,$1,$2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def _pack_bf16x2(low, high):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0,$2,$1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def _low(pair):
        return (pair << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def _high(pair):
        return (pair & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def _load_biased(z, bias, at, ok, HAS_BIAS: tl.constexpr):
        """Two packed pairs (four bf16) of z, the bias added and rounded."""
        quad = tl.load(z + at, mask=ok, other=0)
        first = quad.to(tl.int32)
        second = (quad >> 32).to(tl.int32)
        if HAS_BIAS:
            shift = tl.load(bias + at, mask=ok, other=0)
            first = _add_bf16x2(first, shift.to(tl.int32))
            second = _add_bf16x2(second, (shift >> 32).to(tl.int32))
        return first, second

    @triton.jit
    def _update_four(first, second, mean, m2, reciprocals, step):
        new_mean, new_m2 = _welford_update(_low(first), mean, m2, tl.load(reciprocals + step * 4))
        new_mean, new_m2 = _welford_update(_high(first), new_mean, new_m2, tl.load(reciprocals + step * 4 + 1))
        new_mean, new_m2 = _welford_update(_low(second), new_mean, new_m2, tl.load(reciprocals + step * 4 + 2))
        return _welford_update(_high(second), new_mean, new_m2, tl.load(reciprocals + step * 4 + 3))

    @triton.jit
    def _normed_pair(z, bias, gamma, beta, mean, rstd, at, ok, HAS_BIAS: tl.constexpr):
        pair = tl.load(z.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0)
        if HAS_BIAS:
            pair = _add_bf16x2(pair, tl.load(bias.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0))
        low = tl.math.fma(
            tl.load(gamma + 2 * at, mask=ok, other=0.0),
            rstd * (_low(pair) - mean),
            tl.load(beta + 2 * at, mask=ok, other=0.0),
        )
        high = tl.math.fma(
            tl.load(gamma + 2 * at + 1, mask=ok, other=0.0),
            rstd * (_high(pair) - mean),
            tl.load(beta + 2 * at + 1, mask=ok, other=0.0),
        )
        return _pack_bf16x2(low, high)

    @triton.jit
    def _exact_gated_norm(
        z_ptr,
        bias_ptr,
        gamma_x,
        beta_x,
        gamma_gate,
        beta_gate,
        out_ptr,
        mean_x_ptr,
        rstd_x_ptr,
        mean_gate_ptr,
        rstd_gate_ptr,
        reciprocals,
        rows,
        eps_x,
        eps_gate,
        H: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        STEPS: tl.constexpr,
        UNROLL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        quad_pointer: tl.constexpr = tl.pointer_type(tl.int64)
        u = z_ptr + row * 2 * H
        bias_u = bias_ptr + (row // rows) * 2 * H
        lane = tl.arange(0, 128)
        VECTORS: tl.constexpr = H // 4
        mean_u = tl.zeros([128], tl.float32)
        m2_u = tl.zeros([128], tl.float32)
        mean_g = tl.zeros([128], tl.float32)
        m2_g = tl.zeros([128], tl.float32)
        count = tl.zeros([128], tl.float32)
        for step in tl.range(0, STEPS, num_stages=1, loop_unroll_factor=UNROLL):
            at = step * 128 + lane
            ok = at < VECTORS
            u0, u1 = _load_biased(u.to(quad_pointer), bias_u.to(quad_pointer), at, ok, HAS_BIAS)
            g0, g1 = _load_biased((u + H).to(quad_pointer), (bias_u + H).to(quad_pointer), at, ok, HAS_BIAS)
            next_mean_u, next_m2_u = _update_four(u0, u1, mean_u, m2_u, reciprocals, step)
            next_mean_g, next_m2_g = _update_four(g0, g1, mean_g, m2_g, reciprocals, step)
            if VECTORS % 128 == 0:
                mean_u, m2_u, mean_g, m2_g = next_mean_u, next_m2_u, next_mean_g, next_m2_g
            else:
                mean_u = tl.where(ok, next_mean_u, mean_u)
                m2_u = tl.where(ok, next_m2_u, m2_u)
                mean_g = tl.where(ok, next_mean_g, mean_g)
                m2_g = tl.where(ok, next_m2_g, m2_g)
            count = tl.where(ok, count + 4.0, count)
        mean_x, var_x, _ = tl.reduce((mean_u, m2_u, count), 0, _welford_combine)
        mean_gate, var_gate, _ = tl.reduce((mean_g, m2_g, count), 0, _welford_combine)
        rstd_x = libdevice.rsqrt(tl.math.div_rn(var_x, H * 1.0) + eps_x)
        rstd_gate = libdevice.rsqrt(tl.math.div_rn(var_gate, H * 1.0) + eps_gate)
        tl.store(mean_x_ptr + row, mean_x)
        tl.store(rstd_x_ptr + row, rstd_x)
        tl.store(mean_gate_ptr + row, mean_gate)
        tl.store(rstd_gate_ptr + row, rstd_gate)

        out = (out_ptr + row * H).to(tl.pointer_type(tl.int32))
        for begin in range(0, H // 2, BLOCK // 2):
            at = begin + tl.arange(0, BLOCK // 2)
            ok = at < H // 2
            normed = _normed_pair(u, bias_u, gamma_x, beta_x, mean_x, rstd_x, at, ok, HAS_BIAS)
            gate = _normed_pair(u + H, bias_u + H, gamma_gate, beta_gate, mean_gate, rstd_gate, at, ok, HAS_BIAS)
            low = _low(gate)
            high = _high(gate)
            silu = _pack_bf16x2(
                tl.math.div_rn(low, 1.0 + libdevice.exp(-low)), tl.math.div_rn(high, 1.0 + libdevice.exp(-high))
            )
            tl.store(out + at, _mul_bf16x2(normed, silu), mask=ok)
