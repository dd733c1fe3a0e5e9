"""bias + LN(U) * silu(LN(G)) in one kernel, bit for bit what the kernel that Inductor generates for it computes.

Inductor's looped reduction spreads a row over the lanes of a block, some neighbours to a thread, each with a Welford state
of its own, and combines them at the end (torch._inductor.runtime.triton_helpers). Block and warps, which heuristics and
timings choose, decide the order of the sum. This kernel keeps the order, and saves what makes the generated one twice as
slow: a lane's count is known, so that the division by it is a product with a constant; states of both norms are combined
together, and in halves where they weigh the same; only the last step is masked; values are loaded and unpacked in pairs;
the gate needs no case for large numbers.

`order_of` finds block and warps: it lets Inductor compile the expression for the same shape and compares every bit. Where
no order fits (persistent reductions of short rows, split ones of few rows, another version) there is none, and Inductor's
own kernel stays.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import compat
from ..operators import fake_of, operator
from . import dense
from .exact_gated_norm import plain, unpacked
from .launch import Launch

try:
    import triton
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.language.extra import libdevice

    from .exact_gated_norm import _pack_bf16x2, _silu
except ImportError:
    triton = None


class Order(NamedTuple):
    """In which order a row is summed: lanes of a step, and warps over which they are spread."""

    block: int
    warps: int


ORDERS = (Order(1024, 8), Order(512, 8), Order(512, 4), Order(1024, 4), Order(2048, 16), Order(2048, 8))
_LANES = 128  # pairs that a warp takes at a time where their order does not matter: 16 bytes a thread
_COMPARED_ROWS = 1024
_EPS = 1e-5


@operator
def inductor_gated_norm(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    gamma_x: torch.Tensor,
    beta_x: torch.Tensor,
    gamma_gate: torch.Tensor,
    beta_gate: torch.Tensor,
    eps_x: float,
    eps_gate: float,
    rounded: bool,
    block: int,
    warps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `plain` returns, the statistics in one tensor [4,l,n,1], for z [l,n,2H], bias [l,2H] and norm weights [H].

    In bf16 or fp16, H even, on CUDA. `rounded`: the biased input is rounded to that dtype, as where it is saved. `block`,
    `warps`: an `Order`.
    """
    length, rows, twice_hidden = z.shape
    z = dense(z)
    out = z.new_empty((length, rows, twice_hidden // 2))
    stats = z.new_empty((4, length, rows, 1), dtype=torch.float32)
    norms = [dense(norm) for norm in (gamma_x, beta_x, gamma_gate, beta_gate)]
    run = _launch(z.shape, bias is not None, eps_x, eps_gate, rounded, block, warps, z.dtype, z.device)
    run(z, z if bias is None else dense(bias), *norms, out, stats)
    return out, stats


@functools.lru_cache(maxsize=1024)
def _launch(shape, has_bias, eps_x, eps_gate, rounded, block, warps, dtype, device) -> Launch:
    length, rows, twice_hidden = shape
    return Launch(
        _inductor_gated_norm,
        (length * rows,),
        (length * rows, rows, eps_x, eps_gate, 1.0),
        H=twice_hidden // 2,
        HAS_BIAS=has_bias,
        ROUNDED=rounded,
        QUOTIENT=compat.SILU_IS_A_QUOTIENT,
        BLOCK=block,
        WIDE=min(_LANES * warps, triton.next_power_of_2(twice_hidden // 4)),
        WARPS=warps,
        HALVES=_shares_are_halves(twice_hidden // 2, block, warps, device),
        num_warps=warps,
    )


@functools.lru_cache(maxsize=None)
def _shares_are_halves(hidden: int, block: int, warps: int, device: torch.device) -> bool:
    """Whether the states of a warp weigh the same, and the device's division makes a half of equal weights.

    A lane of the last step has one value more; the weights of later levels are the same times powers of two.
    """
    lanes, per_thread = block // warps, block // (32 * warps)
    steps, left = divmod(hidden, block)
    if left % lanes:
        return False
    weights = torch.tensor([per_thread * count for count in (steps, steps + 1) if count], dtype=torch.float32, device=device)
    shares = torch.empty_like(weights)
    _shares[(len(weights),)](weights, shares)
    return bool((shares == 0.5).all())


@fake_of(inductor_gated_norm)
def _(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate, rounded, block, warps):
    length, rows, twice_hidden = z.shape
    stats = z.new_empty((4, length, rows, 1), dtype=torch.float32)
    return z.new_empty((length, rows, twice_hidden // 2)), stats


@functools.lru_cache(maxsize=None)
def order_of(
    length: int, rows: int, hidden: int, biased: bool, training: bool, dtype: torch.dtype, device: torch.device
) -> Order | None:
    """The order in which Inductor sums the rows of this expression for z [length,rows,2*hidden]; None if none of `ORDERS`.

    `training` also asks for what backward needs: the statistics and, where they are saved, the rounded sums with the bias.
    Compiles the expression and runs it on random operands, again and again until 1,024 rows have been compared.
    """
    usable = triton is not None and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and hidden % 2 == 0
    if not usable or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    saved = training and biased and compat.ROUNDS_SAVED_SUMS_ONLY

    def expression(z, shift, *norms):
        z, shift = (z + shift, None) if saved else (z, shift if biased else None)
        results = plain(z, shift, *norms, _EPS, _EPS)
        return (*results, z) if saved else results if training else results[:1]

    generator = torch.Generator(device).manual_seed(hidden)
    draw = functools.partial(torch.randn, device=device, dtype=dtype, generator=generator)
    shapes = ((length, rows, 2 * hidden), (length, 1, 2 * hidden), *[(hidden,)] * 4)
    compiled, fitting = None, [order for order in ORDERS if order.block <= 2 * hidden]
    for _ in range(-(-_COMPARED_ROWS // (length * rows))):
        z, shift, *norms = operands = tuple(map(draw, shapes))
        compiled = compiled or compat.compiled_by_inductor(expression, operands)
        expected = compiled(*operands)[: 5 if training else 1]
        bias = shift.squeeze(1) if biased else None
        fitting = [
            order
            for order in fitting
            if all(map(torch.equal, unpacked(inductor_gated_norm(z, bias, *norms, _EPS, _EPS, saved, *order)), expected))
        ]
    return fitting[0] if fitting else None


if triton is not None:

    @triton.jit
    def _load(pointer, at, ok, MASKED: tl.constexpr):
        if MASKED:
            return tl.load(pointer + at, mask=ok, other=0)
        return tl.load(pointer + at)

    @triton.jit
    def _two(pair, like):
        """The two values of each pair, in fp32."""
        if like.dtype.element_ty == tl.bfloat16:
            return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)

    @triton.jit
    def _biased(z, bias, like, at, ok, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr):
        low, high = _two(_load(z, at, ok, MASKED), like)
        if HAS_BIAS:
            bias_low, bias_high = _two(_load(bias, at, ok, MASKED), like)
            low += bias_low
            high += bias_high
            if ROUNDED:
                low, high = _two(_pack(low, high, like), like)
        return low, high

    @triton.jit
    def _update(value, mean, m2, reciprocal):
        delta = value - mean
        new_mean = tl.math.fma(delta, reciprocal, mean)
        return new_mean, tl.math.fma(delta, value - new_mean, m2)

    @triton.jit
    def _step(
        u, g, bias_u, bias_g, like, at, ok, count,
        mean_u0, m2_u0, mean_u1, m2_u1, mean_g0, m2_g0, mean_g1, m2_g1,
        MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr,
    ):  # fmt: skip
        """One more value in each lane's four states; `count` says how many there are then.

        A full-range division by it multiplies by the device's approximate reciprocal, and fuses that with the addition.
        """
        u0, u1 = _biased(u, bias_u, like, at, ok, MASKED, HAS_BIAS, ROUNDED)
        g0, g1 = _biased(g, bias_g, like, at, ok, MASKED, HAS_BIAS, ROUNDED)
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [count], dtype=tl.float32, is_pure=True, pack=1
        )
        new_mean_u0, new_m2_u0 = _update(u0, mean_u0, m2_u0, reciprocal)
        new_mean_u1, new_m2_u1 = _update(u1, mean_u1, m2_u1, reciprocal)
        new_mean_g0, new_m2_g0 = _update(g0, mean_g0, m2_g0, reciprocal)
        new_mean_g1, new_m2_g1 = _update(g1, mean_g1, m2_g1, reciprocal)
        if MASKED:
            new_mean_u0 = tl.where(ok, new_mean_u0, mean_u0)
            new_m2_u0 = tl.where(ok, new_m2_u0, m2_u0)
            new_mean_u1 = tl.where(ok, new_mean_u1, mean_u1)
            new_m2_u1 = tl.where(ok, new_m2_u1, m2_u1)
            new_mean_g0 = tl.where(ok, new_mean_g0, mean_g0)
            new_m2_g0 = tl.where(ok, new_m2_g0, m2_g0)
            new_mean_g1 = tl.where(ok, new_mean_g1, mean_g1)
            new_m2_g1 = tl.where(ok, new_m2_g1, m2_g1)
        return new_mean_u0, new_m2_u0, new_mean_u1, new_m2_u1, new_mean_g0, new_m2_g0, new_mean_g1, new_m2_g1

    @triton.jit
    def _shares(weights_ptr, shares_ptr):
        weight = tl.load(weights_ptr + tl.program_id(0))
        mean, _, _ = triton_helpers.welford_combine(0.0 * weight, weight, weight, 0.0 * weight + 1.0, weight, weight)
        tl.store(shares_ptr + tl.program_id(0), mean)

    @triton.jit
    def _combine(
        mean_x1, m2_x1, mean_gate1, m2_gate1, count1, mean_x2, m2_x2, mean_gate2, m2_gate2, count2
    ):  # fmt: skip
        """Inductor's combination of both norms' states at once: they weigh the same."""
        mean_x, m2_x, count = triton_helpers.welford_combine(mean_x1, m2_x1, count1, mean_x2, m2_x2, count2)
        mean_gate, m2_gate, _ = triton_helpers.welford_combine(mean_gate1, m2_gate1, count1, mean_gate2, m2_gate2, count2)
        return mean_x, m2_x, mean_gate, m2_gate, count

    @triton.jit
    def _combine_halves(
        mean_x1, m2_x1, mean_gate1, m2_gate1, count1, mean_x2, m2_x2, mean_gate2, m2_gate2, count2
    ):  # fmt: skip
        """`_combine` of states that weigh the same, where their share is exactly one half."""
        delta, gate_delta = mean_x2 - mean_x1, mean_gate2 - mean_gate1
        return (
            mean_x1 + delta * 0.5,
            m2_x1 + m2_x2 + delta * delta * count1 * 0.5,
            mean_gate1 + gate_delta * 0.5,
            m2_gate1 + m2_gate2 + gate_delta * gate_delta * count1 * 0.5,
            count1 + count2,
        )

    @triton.jit
    def _gated(x, gate, QUOTIENT: tl.constexpr):
        """x silu(gate), silu as the versions write it: gate / (1 + exp(-gate)), or gate * sigmoid(gate).

        A quarter of everything keeps reciprocals normal, and moves no bit of a gate that is 0 or at least 2^-124.
        """
        if QUOTIENT:
            quarter = tl.math.fma(libdevice.exp(-gate), 0.25, 0.25)
            inverse = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [quarter], dtype=tl.float32, is_pure=True, pack=1
            )
            return x * (gate * 0.25 * inverse)
        return x * _silu(gate)

    @triton.jit
    def _normed(low, high, mean, rstd, gamma, beta, like, at, ok, MASKED: tl.constexpr):
        gamma_low, gamma_high = _two(_load(gamma, at, ok, MASKED), like)
        beta_low, beta_high = _two(_load(beta, at, ok, MASKED), like)
        low = tl.math.fma((low - mean) * rstd, gamma_low, beta_low)
        return low, tl.math.fma((high - mean) * rstd, gamma_high, beta_high)

    @triton.jit
    def _pack(low, high, like):
        if like.dtype.element_ty == tl.bfloat16:
            return _pack_bf16x2(low, high)
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        high = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 65535) | (high << 16)

    @triton.jit
    def _gate(
        u, g, bias_u, bias_g, gamma_x, beta_x, gamma_gate, beta_gate, mean_x, rstd_x, mean_gate, rstd_gate, like, at, ok,
        MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, QUOTIENT: tl.constexpr,
    ):  # fmt: skip
        u0, u1 = _biased(u, bias_u, like, at, ok, MASKED, HAS_BIAS, ROUNDED)
        g0, g1 = _biased(g, bias_g, like, at, ok, MASKED, HAS_BIAS, ROUNDED)
        u0, u1 = _normed(u0, u1, mean_x, rstd_x, gamma_x, beta_x, like, at, ok, MASKED)
        g0, g1 = _normed(g0, g1, mean_gate, rstd_gate, gamma_gate, beta_gate, like, at, ok, MASKED)
        return _pack(_gated(u0, g0, QUOTIENT), _gated(u1, g1, QUOTIENT), like)

    @triton.jit
    def _inductor_gated_norm(
        z_ptr, bias_ptr, gamma_x_ptr, beta_x_ptr, gamma_gate_ptr, beta_gate_ptr, out_ptr,
        stats_ptr, total_rows, rows, eps_x, eps_gate, one,
        H: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, QUOTIENT: tl.constexpr,
        BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr, HALVES: tl.constexpr,
    ):  # fmt: skip
        """`one` is 1: a count times a number that the compiler knows would have the exact reciprocal put in its place."""
        # Two values lie in each word that is loaded and stored.
        PAIRS: tl.constexpr = H // 2
        LANES: tl.constexpr = BLOCK // 2
        STEPS: tl.constexpr = PAIRS // LANES
        LEFT: tl.constexpr = PAIRS - STEPS * LANES
        word: tl.constexpr = tl.pointer_type(tl.int32)
        row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
        u = z_ptr.to(word) + row[:, None] * H
        bias_u = bias_ptr.to(word) + (tl.program_id(0) // rows).to(tl.int64) * H
        gamma_x, beta_x = gamma_x_ptr.to(word), beta_x_ptr.to(word)
        gamma_gate, beta_gate = gamma_gate_ptr.to(word), beta_gate_ptr.to(word)
        g, bias_g = u + PAIRS, bias_u + PAIRS
        lane = tl.arange(0, LANES)[None, :]
        mean_u0 = tl.zeros([1, LANES], tl.float32)
        mean_u1, mean_g0, mean_g1 = mean_u0, mean_u0, mean_u0
        m2_u0, m2_u1, m2_g0, m2_g1 = mean_u0, mean_u0, mean_u0, mean_u0
        for step in range(0, STEPS):
            mean_u0, m2_u0, mean_u1, m2_u1, mean_g0, m2_g0, mean_g1, m2_g1 = _step(
                u, g, bias_u, bias_g, z_ptr, step * LANES + lane, lane < LANES, one * (step + 1),
                mean_u0, m2_u0, mean_u1, m2_u1, mean_g0, m2_g0, mean_g1, m2_g1, False, HAS_BIAS, ROUNDED,
            )  # fmt: skip
        if LEFT > 0:
            mean_u0, m2_u0, mean_u1, m2_u1, mean_g0, m2_g0, mean_g1, m2_g1 = _step(
                u, g, bias_u, bias_g, z_ptr, STEPS * LANES + lane, lane < LEFT, one * (STEPS + 1),
                mean_u0, m2_u0, mean_u1, m2_u1, mean_g0, m2_g0, mean_g1, m2_g1, True, HAS_BIAS, ROUNDED,
            )  # fmt: skip
        count = tl.where(tl.arange(0, BLOCK)[None, :] < 2 * LEFT, STEPS + 1.0, STEPS * 1.0)
        mean_u, m2_u = tl.interleave(mean_u0, mean_u1), tl.interleave(m2_u0, m2_u1)
        mean_g, m2_g = tl.interleave(mean_g0, mean_g1), tl.interleave(m2_g0, m2_g1)
        if HALVES:  # in a thread, then in a warp, then over the warps, as it is done without being told
            EACH: tl.constexpr = BLOCK // (32 * WARPS)
            mean_u, m2_u = tl.reshape(mean_u, [WARPS, 32, EACH]), tl.reshape(m2_u, [WARPS, 32, EACH])
            mean_g, m2_g = tl.reshape(mean_g, [WARPS, 32, EACH]), tl.reshape(m2_g, [WARPS, 32, EACH])
            count = tl.reshape(count, [WARPS, 32, EACH])
            mean_u, m2_u, mean_g, m2_g, count = tl.reduce((mean_u, m2_u, mean_g, m2_g, count), 2, _combine)
            mean_u, m2_u, mean_g, m2_g, count = tl.reduce((mean_u, m2_u, mean_g, m2_g, count), 1, _combine_halves)
            mean_x, var_x, mean_gate, var_gate, _ = tl.reduce((mean_u, m2_u, mean_g, m2_g, count), 0, _combine)
        else:
            mean_x, var_x, mean_gate, var_gate, _ = tl.reduce((mean_u, m2_u, mean_g, m2_g, count), 1, _combine)
        rstd_x = libdevice.rsqrt(var_x / (H * 1.0) + eps_x)
        rstd_gate = libdevice.rsqrt(var_gate / (H * 1.0) + eps_gate)
        tl.store(stats_ptr + row, mean_x)
        tl.store(stats_ptr + total_rows + row, rstd_x)
        tl.store(stats_ptr + 2 * total_rows + row, mean_gate)
        tl.store(stats_ptr + 3 * total_rows + row, rstd_gate)
        mean_x, rstd_x, mean_gate, rstd_gate = mean_x[:, None], rstd_x[:, None], mean_gate[:, None], rstd_gate[:, None]
        out = out_ptr.to(word) + row[:, None] * PAIRS
        wide = tl.arange(0, WIDE)[None, :]
        WHOLE: tl.constexpr = PAIRS // WIDE * WIDE
        for begin in range(0, WHOLE, WIDE):
            pair = _gate(
                u, g, bias_u, bias_g, gamma_x, beta_x, gamma_gate, beta_gate,
                mean_x, rstd_x, mean_gate, rstd_gate, z_ptr, begin + wide, wide < WIDE, False, HAS_BIAS, ROUNDED, QUOTIENT,
            )  # fmt: skip
            tl.store(out + begin + wide, pair)
        if WHOLE < PAIRS:
            ok = wide < PAIRS - WHOLE
            pair = _gate(
                u, g, bias_u, bias_g, gamma_x, beta_x, gamma_gate, beta_gate,
                mean_x, rstd_x, mean_gate, rstd_gate, z_ptr, WHOLE + wide, ok, True, HAS_BIAS, ROUNDED, QUOTIENT,
            )  # fmt: skip
            tl.store(out + WHOLE + wide, pair, mask=ok)
