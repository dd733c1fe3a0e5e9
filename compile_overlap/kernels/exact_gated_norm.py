"""bias + LN(U) * silu(LN(G)) in one pass on Hopper, bit for bit what eager PyTorch computes in bf16.

The statistics follow the order of ATen's vectorised CUDA LayerNorm (aten/src/ATen/native/cuda/layer_norm_kernel.cu):
128 lanes of four elements a step, Welford's update, warp shuffles 16, 8, 4, 2, 1, then warps 2, 1. Everything that
eager stores in bf16 is rounded to bf16: the biased input, both norms, the gate, the product. A sum or product of two
bf16 values rounds the same directly as through fp32, so the bias and the product use packed bf16 arithmetic.

The kernel is bound by instructions. What it saves on:

- Welford's factors 1/i are constants of the unrolled loop; where all lanes hold as many elements (H divisible by 512),
  the two sides of every combination weigh exactly one half, and both statistics are reduced together.
- A bf16 gate has 65,536 values: `silu` by the approximate exponential and reciprocal rounds to eager's bf16 for all of
  them, which `_agrees_with_aten` checks on the device, all of them, before the first use.

The grid is one program a row; four warps, because the reduction order needs one lane a thread and four warps.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from . import dense
from .launch import Launch

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
_PROBED_ROWS = 64

aten = torch.ops.aten


def takes(z: torch.Tensor) -> bool:
    """Whether the kernel computes this input [l,n,2H]: bf16, SM90, contiguous, H a multiple of four, 8-byte rows."""
    hidden = z.shape[-1] // 2
    usable = triton is not None and z.is_cuda and z.dtype == torch.bfloat16 and z.is_contiguous()
    aligned = hidden % _VECTOR == 0 and z.data_ptr() % (2 * _VECTOR) == 0 and z.numel() > 0
    return usable and aligned and _has_packed_bf16(z.device) and _agrees_with_aten(hidden, z.device)


def forward(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x: float, eps_gate: float):
    """See `recipes.exact.gated_norm_forward`; `takes(z)` must hold."""
    length, rows, twice_hidden = z.shape
    hidden = twice_hidden // 2
    out = z.new_empty((length, rows, hidden))
    stats = z.new_empty((4, length, rows, 1), dtype=torch.float32)
    norms = [dense(norm) for norm in (gamma_x, beta_x, gamma_gate, beta_gate)]
    run = _launch(length, rows, hidden, bias is not None, eps_x, eps_gate, z.dtype, z.device)
    run(z, z if bias is None else dense(bias), *norms, out, stats)
    return out, stats


@functools.lru_cache(maxsize=1024)
def _launch(length, rows, hidden, has_bias, eps_x, eps_gate, dtype, device) -> Launch:
    vectors, steps = hidden // _VECTOR, triton.cdiv(hidden // _VECTOR, _LANES)
    return Launch(
        _exact_gated_norm,
        (length * rows,),
        (length * rows, rows, eps_x, eps_gate),
        H=hidden,
        HAS_BIAS=has_bias,
        STEPS=steps,
        EVEN=vectors % _LANES == 0 and _halves(steps * _VECTOR),
        BLOCK=min(_BLOCK, triton.next_power_of_2(hidden)),
        num_warps=_WARPS,
    )


def by_aten(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x: float, eps_gate: float):
    """The same by eager PyTorch's own sequence of operators."""
    shift = None if bias is None else bias.unsqueeze(1)
    product, *stats = plain(z, shift, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate)
    return product, torch.stack(stats)


def unpacked(results: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The product and the packed statistics of a gated norm in the form of `plain`'s results."""
    return (results[0], *results[1].unbind())


def plain(z, shift, gamma_x, beta_x, gamma_gate, beta_gate, eps_x: float, eps_gate: float):
    """The expression in plain operators: the product [l,n,H], mean and reciprocal deviation of both norms [l,n,1].

    z [l,n,2H], shift [l,1,2H] or None, the norms' weights [H].
    """
    u, g = (z if shift is None else z + shift).chunk(2, dim=-1)
    hidden = (u.shape[-1],)
    normed, *stats_x = torch.native_layer_norm(u, hidden, gamma_x, beta_x, eps_x)
    gate, *stats_gate = torch.native_layer_norm(g, hidden, gamma_gate, beta_gate, eps_gate)
    return normed * F.silu(gate), *stats_x, *stats_gate


@functools.lru_cache(maxsize=None)
def _halves(count: int) -> bool:
    """Whether `count * (1 / (2 * count))` is one half in fp32, as it then is for the counts of all later levels."""
    return float(torch.tensor(float(count)) * (1.0 / torch.tensor(2.0 * count))) == 0.5


@functools.lru_cache(maxsize=None)
def _has_packed_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache(maxsize=None)
def _agrees_with_aten(hidden: int, device: torch.device) -> bool:
    """Whether this device and this version of ATen round as the kernel does: every gate, and rows of three scales."""
    everything = torch.arange(1 << 16, device=device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = torch.empty_like(everything)
    _silu_of[(gates.numel() // 1024,)](everything, gates, BLOCK=1024)
    if not torch.equal(gates.nan_to_num(), aten.silu(everything).nan_to_num()):
        return False
    generator = torch.Generator(device).manual_seed(hidden)
    draw = functools.partial(torch.randn, device=device, generator=generator)
    scales = torch.tensor([0.01, 1.0, 100.0], device=device).view(3, 1, 1)
    z = (scales * draw((3, _PROBED_ROWS, 2 * hidden))).bfloat16()
    bias, *norms = (draw(shape).bfloat16() for shape in ((3, 2 * hidden), *[(hidden,)] * 4))
    pairs = zip(forward(z, bias, *norms, 1e-5, 1e-5), by_aten(z, bias, *norms, 1e-5, 1e-5))
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


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
    def _combine_halves(mean_b, m2_b, gate_mean_b, gate_m2_b, count_b, mean_a, m2_a, gate_mean_a, gate_m2_a, count_a):
        """`_welford_combine` of both statistics at once, for equal counts."""
        delta = mean_b - mean_a
        gate_delta = gate_mean_b - gate_mean_a
        return (
            tl.math.fma(0.5, mean_a, 0.5 * mean_b),
            tl.math.fma(delta * delta * count_a, 0.5, m2_a + m2_b),
            tl.math.fma(0.5, gate_mean_a, 0.5 * gate_mean_b),
            tl.math.fma(gate_delta * gate_delta * count_a, 0.5, gate_m2_a + gate_m2_b),
            count_a + count_b,
        )

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
    def _silu(x):
        """x / (1 + exp(-x)); scaled by 2^-32 inside, so that no reciprocal is subnormal."""
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        scaled = tl.math.fma(power, 2.3283064365386963e-10, 2.3283064365386963e-10)
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * (inverse * 2.3283064365386963e-10)

    @triton.jit
    def _silu_of(x_ptr, out_ptr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, _silu(tl.load(x_ptr + at).to(tl.float32)).to(tl.bfloat16))

    @triton.jit
    def _load_biased(z, bias, at, ok, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr):
        """Two packed pairs (four bf16) of z, the bias added and rounded."""
        if MASKED:
            quad = tl.load(z + at, mask=ok, other=0)
        else:
            quad = tl.load(z + at)
        first = quad.to(tl.int32)
        second = (quad >> 32).to(tl.int32)
        if HAS_BIAS:
            if MASKED:
                shift = tl.load(bias + at, mask=ok, other=0)
            else:
                shift = tl.load(bias + at)
            first = _add_bf16x2(first, shift.to(tl.int32))
            second = _add_bf16x2(second, (shift >> 32).to(tl.int32))
        return first, second

    @triton.jit
    def _update_four(z, bias, mean, m2, at, ok, STEP: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr):
        first, second = _load_biased(z, bias, at, ok, MASKED, HAS_BIAS)
        new_mean, new_m2 = _welford_update(_low(first), mean, m2, 1.0 / (4 * STEP + 1))
        new_mean, new_m2 = _welford_update(_high(first), new_mean, new_m2, 1.0 / (4 * STEP + 2))
        new_mean, new_m2 = _welford_update(_low(second), new_mean, new_m2, 1.0 / (4 * STEP + 3))
        new_mean, new_m2 = _welford_update(_high(second), new_mean, new_m2, 1.0 / (4 * STEP + 4))
        if MASKED:
            new_mean = tl.where(ok, new_mean, mean)
            new_m2 = tl.where(ok, new_m2, m2)
        return new_mean, new_m2

    @triton.jit
    def _load_two(pointer, at, ok):
        pair = tl.load(pointer.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0)
        return _low(pair), _high(pair)

    @triton.jit
    def _normed_pair(z, bias, gamma, beta, mean, rstd, at, ok, HAS_BIAS: tl.constexpr):
        pair = tl.load(z.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0)
        if HAS_BIAS:
            pair = _add_bf16x2(pair, tl.load(bias.to(tl.pointer_type(tl.int32)) + at, mask=ok, other=0))
        gamma_low, gamma_high = _load_two(gamma, at, ok)
        beta_low, beta_high = _load_two(beta, at, ok)
        low = tl.math.fma(gamma_low, rstd * (_low(pair) - mean), beta_low)
        high = tl.math.fma(gamma_high, rstd * (_high(pair) - mean), beta_high)
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
        stats_ptr,
        total_rows,
        rows,
        eps_x,
        eps_gate,
        H: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        STEPS: tl.constexpr,
        EVEN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        quad_pointer: tl.constexpr = tl.pointer_type(tl.int64)
        u = z_ptr + row * 2 * H
        bias_u = bias_ptr + (row // rows) * 2 * H
        quads_u, quads_g = u.to(quad_pointer), (u + H).to(quad_pointer)
        bias_quads_u, bias_quads_g = bias_u.to(quad_pointer), (bias_u + H).to(quad_pointer)
        lane = tl.arange(0, 128)
        VECTORS: tl.constexpr = H // 4
        mean_u = tl.zeros([128], tl.float32)
        m2_u = tl.zeros([128], tl.float32)
        mean_g = tl.zeros([128], tl.float32)
        m2_g = tl.zeros([128], tl.float32)
        for step in tl.static_range(STEPS):
            at = step * 128 + lane
            ok = at < VECTORS
            mean_u, m2_u = _update_four(quads_u, bias_quads_u, mean_u, m2_u, at, ok, step, (step + 1) * 128 > VECTORS, HAS_BIAS)
            mean_g, m2_g = _update_four(quads_g, bias_quads_g, mean_g, m2_g, at, ok, step, (step + 1) * 128 > VECTORS, HAS_BIAS)
        count = (4 * ((VECTORS - lane + 127) // 128)).to(tl.float32)
        if EVEN:
            mean_x, var_x, mean_gate, var_gate, _ = tl.reduce((mean_u, m2_u, mean_g, m2_g, count), 0, _combine_halves)
        else:
            mean_x, var_x, _ = tl.reduce((mean_u, m2_u, count), 0, _welford_combine)
            mean_gate, var_gate, _ = tl.reduce((mean_g, m2_g, count), 0, _welford_combine)
        rstd_x = libdevice.rsqrt(tl.math.div_rn(var_x, H * 1.0) + eps_x)
        rstd_gate = libdevice.rsqrt(tl.math.div_rn(var_gate, H * 1.0) + eps_gate)
        tl.store(stats_ptr + row, mean_x)
        tl.store(stats_ptr + total_rows + row, rstd_x)
        tl.store(stats_ptr + 2 * total_rows + row, mean_gate)
        tl.store(stats_ptr + 3 * total_rows + row, rstd_gate)

        out = (out_ptr + row * H).to(tl.pointer_type(tl.int32))
        for begin in range(0, H // 2, BLOCK // 2):
            pair = begin + tl.arange(0, BLOCK // 2)
            in_row = pair < H // 2
            normed = _normed_pair(u, bias_u, gamma_x, beta_x, mean_x, rstd_x, pair, in_row, HAS_BIAS)
            gate = _normed_pair(u + H, bias_u + H, gamma_gate, beta_gate, mean_gate, rstd_gate, pair, in_row, HAS_BIAS)
            silu = _pack_bf16x2(_silu(_low(gate)), _silu(_high(gate)))
            tl.store(out + pair, _mul_bf16x2(normed, silu), mask=in_row)
