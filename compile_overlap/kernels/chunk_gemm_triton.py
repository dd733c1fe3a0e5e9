"""A persistent batched GEMM in Triton, for versions of cuBLAS that are slower at it.

    out[l] = left[l] @ right[l]        left [l,m,K], right [l,K,n] or a transposed view of [l,n,K]

K is summed in order in fp32, as cuBLAS' own kernels do: where the result equals `torch.bmm` bit for bit and comes sooner
(`beats_cublas` measures both), it may take its place. cuBLAS 12.4, which torch 2.6.0 brings, needs 2.93 ms for the default
workload's first GEMM on an H200, such a kernel 2.15 ms; newer versions are faster than it.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd import Function

from ..operators import direct, fake_of, operator
from . import sm_count
from .gemm_combine import UNALIGNED_TILES, Tile, laid_out, step_of, tile_for
from .launch import Launch

try:
    import triton
    import triton.language as tl

    from .gemm_combine import pointer_product
except ImportError:
    triton = None

TILES = (Tile(128, 256, 8, 3, 1.0), Tile(128, 128, 8, 4, 0.6), Tile(64, 128, 4, 4, 0.35))
_K_BLOCK = 64
_MEASURED_TOKENS, _REPEATS = 8, 10


@operator
def chunk_bmm_triton(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`torch.bmm` of [l,m,K] and [l,K,n] in bf16 or fp16: [l,m,n]."""
    out = left.new_empty((left.shape[0], left.shape[1], right.shape[2]))
    bmm_into(left, right, out)
    return out


def bmm_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """`torch.bmm(left, right, out=out)`; rows of `out` lie together, and begin at multiples of eight if n is one."""
    right, transposed = laid_out(right)
    step = step_of(left.shape[2])
    if left.stride(2) != 1 or any(stride % step for stride in left.stride()[:2]):
        left = left.contiguous()
    strides = left.stride(), right.stride(), out.stride()
    _launch(left.shape, right.shape[2], *strides, transposed, left.dtype, left.device)(left, right, out)


@functools.lru_cache(maxsize=1024)
def _launch(left_shape, columns, left_strides, right_strides, out_strides, transposed, dtype, device) -> Launch:
    length, rows, inner = left_shape
    sms = sm_count(device)
    inner_step, column_step = step_of(inner), step_of(columns)
    tile = tile_for(length, rows, columns, sms, TILES if inner_step == column_step == 8 else UNALIGNED_TILES)
    tiles = length * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    strides = *left_strides[:2], right_strides[0], right_strides[2 if transposed else 1], *out_strides[:2]
    return Launch(
        _chunk_bmm, (min(sms, tiles),), (rows, columns, inner, tiles, *strides),
        TRANSPOSED=transposed, BM=tile.rows, BN=tile.columns, BK=_K_BLOCK,
        WHOLE=inner % _K_BLOCK == 0 and rows % tile.rows == 0 and columns % tile.columns == 0,
        INNER_STEP=inner_step, COLUMN_STEP=column_step,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@fake_of(chunk_bmm_triton)
def _(left, right):
    return left.new_empty((left.shape[0], left.shape[1], right.shape[2]))


def product(left: torch.Tensor, right: torch.Tensor, own: bool) -> torch.Tensor:
    """left [l,m,K] @ right [l,K,n], by this kernel or by cuBLAS; not differentiable."""
    return chunk_bmm_triton(left, right) if own else torch.bmm(left, right)


class _Bmm(Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return chunk_bmm_triton(left, right)

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        return torch.bmm(grad, right.transpose(1, 2)), torch.bmm(left.transpose(1, 2), grad)


def bmm(left: torch.Tensor, right: torch.Tensor, own: bool) -> torch.Tensor:
    """`product` with the gradients of `torch.bmm`."""
    return _Bmm.apply(left, right) if own else torch.bmm(left, right)


def beats_cublas(
    length: int, rows: int, inner: int, columns: int, transposed: bool, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernel equals `torch.bmm` bit for bit and takes less time, on random operands of at most eight tokens.

    `left` is laid out as the exchange leaves it, [m,l,K]. False where the kernel does not run.
    """
    if triton is None or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    length = min(length, _MEASURED_TOKENS)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size):
        return torch.randn(size, device=device, generator=generator).to(dtype)

    left = draw(rows, length, inner).transpose(0, 1)
    right = draw(length, columns, inner).transpose(1, 2) if transposed else draw(length, inner, columns)
    if not torch.equal(chunk_bmm_triton(left, right), torch.bmm(left, right)):
        return False
    seconds = {gemm: [] for gemm in (direct.chunk_bmm_triton, torch.bmm)}
    for _ in range(_REPEATS):
        for gemm, times in seconds.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            gemm(left, right)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    ours, theirs = (sorted(times)[_REPEATS // 2] for times in seconds.values())
    return ours < theirs


if triton is not None:

    @triton.jit
    def _chunk_bmm(
        left, right, out, rows, columns, inner, tiles, left_stride, left_pitch, right_stride, right_pitch,
        out_stride, out_pitch,
        TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
        INNER_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr,
    ):  # fmt: skip
        # The same values, in a form that tells the compiler what divides them: it knows of 16 alone.
        left_stride = left_stride // INNER_STEP * INNER_STEP
        left_pitch = left_pitch // INNER_STEP * INNER_STEP
        columns = columns // COLUMN_STEP * COLUMN_STEP
        out_stride = out_stride // COLUMN_STEP * COLUMN_STEP
        out_pitch = out_pitch // COLUMN_STEP * COLUMN_STEP
        PITCH_STEP: tl.constexpr = INNER_STEP if TRANSPOSED else COLUMN_STEP
        right_stride = right_stride // PITCH_STEP * PITCH_STEP
        right_pitch = right_pitch // PITCH_STEP * PITCH_STEP
        row_blocks = tl.cdiv(rows, BM)
        blocks = row_blocks * tl.cdiv(columns, BN)
        for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            l = (index // blocks).to(tl.int64)
            first_row = (index % blocks) % row_blocks * BM
            first_column = (index % blocks) // row_blocks * BN
            a_tile = left + l * left_stride + first_row.to(tl.int64) * left_pitch
            b_tile = right + l * right_stride
            b_tile += first_column.to(tl.int64) * right_pitch if TRANSPOSED else first_column
            accumulator = pointer_product(
                a_tile, b_tile, rows - first_row, columns - first_column, inner, left_pitch, right_pitch,
                TRANSPOSED, BM, BN, BK, WHOLE,
            )  # fmt: skip
            row = tl.arange(0, BM)
            column = tl.arange(0, BN)
            to = out + l * out_stride + first_row.to(tl.int64) * out_pitch + first_column
            at = row[:, None] * out_pitch + column[None, :]
            value = accumulator.to(out.dtype.element_ty)
            if WHOLE:
                tl.store(to + at, value)
            else:
                inside = (row < rows - first_row)[:, None] & (column < columns - first_column)[None, :]
                tl.store(to + at, value, mask=inside)
