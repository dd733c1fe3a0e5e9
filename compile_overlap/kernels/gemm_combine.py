"""A batched GEMM whose tiles are stored straight into the output of the rank that they belong to.

    y[b, t0+l, :] of rank p = left[l, p*B+b, :] @ right[l] + bias[l]        left [l,P*B,K], right [l,K,D], bias [l,D]

Nothing is packed, sent by a collective or unpacked: the epilogue adds the bias and writes through the peers' symmetric
memory. A persistent grid walks over the tiles; the row blocks vary fastest, so that the tiles in flight go to all peers.
K is summed in order in fp32, as cuBLAS does: the result equals `torch.bmm` bit for bit, which `agrees_with_cublas` checks
for each kind of shape before its first use.

The addresses are said to be aligned, so that 16 bytes are stored at a time. A pointer that was read from memory is taken
for unaligned otherwise: two bytes at a time, with an address for each, for which the accumulator leaves no registers.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from . import sm_count
from .launch import Launch
from .meeting import Meeting

try:
    import triton
    import triton.language as tl

    from .meeting import tell
except ImportError:
    triton = None
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4: loads by pointer
    TensorDescriptor = None

NO_BIAS, ADD, BADDBMM = 0, 1, 2
_K_BLOCK = 64
# Products below which descriptors are not worth the 20 us in which the host makes them.
_DESCRIBED_FROM = 1 << 32


class Tile(NamedTuple):
    """Rows and columns of a tile, warps, pipeline stages, what a wave of such tiles costs, relatively, and whether tiles
    and K are one loop: a tile's first blocks are then on their way while the one before is stored (with descriptors)."""

    rows: int
    columns: int
    warps: int
    stages: int
    cost: float
    flat: bool = False


# Costs: measured on an H200 (`reports/results/h200-torch-2.11.0/kernels.log`).
TILES = (
    Tile(128, 256, 8, 4, 1.0, flat=True), Tile(256, 128, 8, 4, 1.02),
    Tile(128, 128, 4, 4, 0.55, flat=True), Tile(64, 128, 4, 4, 0.35, flat=True),
)  # fmt: skip
# Loads by pointer keep addresses in registers: three stages fit beside a large tile. The costs are estimates.
POINTER_TILES = (Tile(256, 128, 8, 3, 1.1), Tile(128, 128, 8, 4, 0.6), Tile(64, 128, 4, 4, 0.35))
# Where rows are not aligned to 16 bytes every element or pair of them has an address of its own.
UNALIGNED_TILES = (Tile(128, 64, 8, 3, 1.0), Tile(64, 64, 4, 4, 0.6))


def tile_for(tokens: int, rows: int, columns: int, sms: int, tiles: tuple[Tile, ...] = TILES) -> Tile:
    """The tile whose waves over `sms` multiprocessors take the least time."""

    def cost(tile: Tile) -> float:
        count = tokens * -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-count // sms) * tile.cost

    return min(tiles, key=cost)


def step_of(count: int) -> int:
    """The largest power of two up to eight that divides `count`: elements of two bytes that lie at an aligned address."""
    return math.gcd(count, 8)


def laid_out(right: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`right` [l,K,n] as the kernels take it, and whether it is a transposed view; copied where it is laid out otherwise.

    Rows (of the transposed, where it is one) lie together, and begin at multiples of `step_of` their length.
    """
    if right.is_contiguous():
        return right, False
    for transposed, rows in ((False, right), (True, right.transpose(1, 2))):
        step = step_of(rows.shape[2])
        if rows.stride(2) == 1 and rows.stride(0) % step == rows.stride(1) % step == 0:
            return right, transposed
    return right.contiguous(), False


def gemm_combine(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    addresses: torch.Tensor,
    batch: int,
    tokens: int,
    first: int,
    bias_form: int,
    meeting: Meeting | None = None,
) -> None:
    """Store left [l,P*batch,K] @ right [l,K,D] (+ bias [l,D]) to rows `first`..`first`+l of each rank's [batch,tokens,D].

    `addresses` [P], int64, on the device: where each rank's output begins, aligned to 16 bytes. `bias_form`: NO_BIAS, or
    ADD or BADDBMM for a bias that is added after the product is rounded or before. `right` may be a transposed view. bf16
    or fp16, compute capability 9.0. When all is stored, the ranks of the meeting are told.
    """
    left = left.contiguous()
    right, transposed = laid_out(right)
    aligned = left.data_ptr() % 16 == right.data_ptr() % 16 == 0
    strides = right.stride()
    prepared = _prepared(
        left.shape, right.shape, strides, transposed, aligned, batch, tokens, first, bias_form,
        None if meeting is None else meeting.numbers, left.dtype, left.device,
    )  # fmt: skip
    operands = (left, right) if prepared.blocks is None else _described(left, right, strides, transposed, *prepared.blocks)
    told = (addresses, addresses) if meeting is None else (meeting.flags, meeting.counts)
    prepared.launch(*operands, left if bias is None else bias.contiguous(), addresses, *told)


class _Prepared(NamedTuple):
    """A launch, and the tensor-memory blocks of left and right that it takes; None where it loads by pointer."""

    launch: Launch
    blocks: tuple[list[int], list[int]] | None


@functools.lru_cache(maxsize=1024)
def _prepared(
    left_shape, right_shape, strides, transposed, aligned, batch, tokens, first, bias_form, meeting, dtype, device
) -> _Prepared:  # fmt: skip
    length, rows, inner = left_shape
    columns = right_shape[2]
    sms = sm_count(device)
    pitch = strides[2] if transposed else strides[1]
    dense = strides[0] == pitch * (columns if transposed else inner)
    # Descriptors need rows aligned to 16 bytes, and matrices back to back; the kernel, whole blocks of K.
    described = TensorDescriptor is not None and aligned and pitch % 8 == 0 and inner % _K_BLOCK == 0 and dense
    described = described and length * rows * columns * inner >= _DESCRIBED_FROM
    by_pointer = POINTER_TILES if step_of(inner) == step_of(columns) == 8 else UNALIGNED_TILES
    tile = tile_for(length, rows, columns, sms, TILES if described else by_pointer)
    tiles = length * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    place, ranks = (meeting or (0, 0))[:2]
    launch = Launch(
        _gemm_combine,
        (min(sms, tiles),),
        (place, ranks, rows, columns, inner, tiles, strides[0], pitch, batch, tokens, first),
        MEETS=meeting is not None,
        TMA=described,
        FLAT=described and tile.flat,
        TRANSPOSED=transposed,
        BIAS=bias_form,
        BM=tile.rows,
        BN=tile.columns,
        BK=_K_BLOCK,
        WHOLE=inner % _K_BLOCK == 0 and (transposed or columns % tile.columns == 0),
        INNER_STEP=step_of(inner),
        COLUMN_STEP=step_of(columns),
        num_warps=tile.warps,
        num_stages=tile.stages,
        descriptors=2 * described,
    )
    right_block = [tile.columns, _K_BLOCK] if transposed else [_K_BLOCK, tile.columns]
    return _Prepared(launch, ([tile.rows, _K_BLOCK], right_block) if described else None)


def _described(left, right, strides, transposed, left_block, right_block):
    """Tensor-memory descriptors of the operands: their matrices, one behind another."""
    length, rows, inner = left.shape
    columns = right.shape[2]
    a = TensorDescriptor(left, [length * rows, inner], [inner, 1], left_block)
    if transposed:
        return a, TensorDescriptor(right, [length * columns, inner], [strides[2], 1], right_block)
    return a, TensorDescriptor(right, [length * inner, columns], [strides[1], 1], right_block)


def agrees_with_cublas(
    length: int, rows: int, inner: int, columns: int, transposed: bool, bias_form: int, dtype: torch.dtype, device
) -> bool:
    """Whether the kernel rounds as `torch.bmm` does for this shape: both are run once on random operands."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, device=device, generator=generator)
    left = draw((length, rows, inner)).to(dtype)
    right = draw((length, columns, inner) if transposed else (length, inner, columns)).to(dtype)
    right = right.transpose(1, 2) if transposed else right
    bias = draw((length, columns)).to(dtype)
    out = torch.zeros((rows, length, columns), dtype=dtype, device=device)
    addresses = torch.tensor([out.data_ptr()], device=device)
    gemm_combine(left, right, bias if bias_form else None, addresses, rows, length, 0, bias_form)
    expected = torch.bmm(left, right)
    if bias_form == ADD:
        expected = expected + bias.unsqueeze(1)
    elif bias_form == BADDBMM:
        expected = torch.baddbmm(bias.unsqueeze(1), left, right)
    return torch.equal(out.transpose(0, 1), expected)


if triton is not None:

    @triton.jit
    def pointer_product(
        a_tile, b_tile, rows, columns, inner, a_pitch, b_pitch,
        TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """The tile [BM,BN], in fp32, of a product whose operands are loaded by pointer, from where the tile begins.

        `rows` and `columns` are left from there; rows past the end repeat the last one. `WHOLE`: K is a whole number of
        blocks and no column of an untransposed b is past the end.
        """
        depth = tl.arange(0, BK)
        column = tl.arange(0, BN)
        a_at = tl.minimum(tl.arange(0, BM), rows - 1)[:, None] * a_pitch + depth[None, :]
        if TRANSPOSED:
            b_at = tl.minimum(column, columns - 1)[:, None] * b_pitch + depth[None, :]
        else:
            b_at = depth[:, None] * b_pitch + column[None, :]
        accumulator = tl.zeros([BM, BN], tl.float32)
        for k in range(0, inner, BK):
            if WHOLE:
                a = tl.load(a_tile + a_at)
                b = tl.load(b_tile + b_at)
            else:
                in_depth = depth < inner - k
                a = tl.load(a_tile + a_at, mask=in_depth[None, :], other=0.0)
                if TRANSPOSED:
                    b = tl.load(b_tile + b_at, mask=in_depth[None, :], other=0.0)
                else:
                    b = tl.load(b_tile + b_at, mask=in_depth[:, None] & (column < columns)[None, :], other=0.0)
            accumulator = tl.dot(a, tl.trans(b) if TRANSPOSED else b, accumulator)
            a_tile += BK
            b_tile += BK if TRANSPOSED else BK * b_pitch
        return accumulator

    @triton.jit
    def _store_tile(
        index, left, right, bias, addresses, rows, columns, inner, row_blocks, blocks, right_stride, right_pitch, batch,
        tokens, first, TMA: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        BK: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Compute a tile and store it to its owners."""
        l = index // blocks
        first_row = (index % blocks) % row_blocks * BM
        first_column = (index % blocks) // row_blocks * BN
        row = first_row + tl.arange(0, BM)
        in_rows = row < rows
        if TMA:
            accumulator = tl.zeros([BM, BN], tl.float32)
            for k in range(0, inner, BK):
                a = left.load([l * rows + first_row, k])
                if TRANSPOSED:
                    b = tl.trans(right.load([l * columns + first_column, k]))
                else:
                    b = right.load([l * inner + k, first_column])
                accumulator = tl.dot(a, b, accumulator)
        else:
            a_tile = left + (l * rows + first_row).to(tl.int64) * inner
            b_tile = right + l.to(tl.int64) * right_stride
            b_tile += first_column.to(tl.int64) * right_pitch if TRANSPOSED else first_column
            accumulator = pointer_product(
                a_tile, b_tile, rows - first_row, columns - first_column, inner, inner, right_pitch,
                TRANSPOSED, BM, BN, BK, WHOLE,
            )  # fmt: skip
        owner = tl.load(addresses + row // batch, mask=in_rows, other=0)
        pointer_type: tl.constexpr = tl.pointer_type(bias.dtype.element_ty)
        at_row = ((row % batch).to(tl.int64) * tokens + first + l) * columns
        row_pointers = tl.multiple_of(owner.to(pointer_type), 16) + at_row
        column = first_column + tl.arange(0, BN)
        inside = column < columns
        if BIAS == 0:
            value = accumulator.to(bias.dtype.element_ty)
        else:
            shift = tl.load(bias + l * columns + column, mask=inside, other=0.0)[None, :].to(tl.float32)
            if BIAS == 1:
                value = (accumulator.to(bias.dtype.element_ty).to(tl.float32) + shift).to(bias.dtype.element_ty)
            else:
                value = (accumulator + shift).to(bias.dtype.element_ty)
        tl.store(row_pointers[:, None] + column[None, :], value, mask=in_rows[:, None] & inside[None, :])

    @triton.jit
    def _gemm_combine(
        left,
        right,
        bias,
        addresses,
        flags,
        counts,
        place,
        ranks,
        rows,
        columns,
        inner,
        tiles,
        right_stride,
        right_pitch,
        batch,
        tokens,
        first,
        MEETS: tl.constexpr,
        TMA: tl.constexpr,
        FLAT: tl.constexpr,
        TRANSPOSED: tl.constexpr,
        BIAS: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
        WHOLE: tl.constexpr,
        INNER_STEP: tl.constexpr,
        COLUMN_STEP: tl.constexpr,
    ):
        # The same values, in a form that tells the compiler what divides them: it knows of 16 alone.
        inner = inner // INNER_STEP * INNER_STEP
        columns = columns // COLUMN_STEP * COLUMN_STEP
        PITCH_STEP: tl.constexpr = INNER_STEP if TRANSPOSED else COLUMN_STEP
        right_pitch = right_pitch // PITCH_STEP * PITCH_STEP
        right_stride = right_stride // PITCH_STEP * PITCH_STEP
        row_blocks = tl.cdiv(rows, BM)
        blocks = row_blocks * tl.cdiv(columns, BN)
        if FLAT:
            for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
                _store_tile(
                    index, left, right, bias, addresses, rows, columns, inner, row_blocks, blocks, right_stride, right_pitch,
                    batch, tokens, first, TMA, TRANSPOSED, BIAS, BM, BN, BK, WHOLE,
                )  # fmt: skip
        else:
            for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
                _store_tile(
                    index, left, right, bias, addresses, rows, columns, inner, row_blocks, blocks, right_stride, right_pitch,
                    batch, tokens, first, TMA, TRANSPOSED, BIAS, BM, BN, BK, WHOLE,
                )  # fmt: skip
        if MEETS:
            tell(flags, counts, place, ranks, tl.num_programs(0))
