"""What one configuration does: chunk sizes and, once decided, recipe. A pure function of values that all ranks share."""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import Settings
from .layout import require

DEFAULT_CHUNKS = 4
MIN_TOKENS = 2


def border_quantum(device: str, rows: int, H: int) -> int:
    """Tokens of which a chunk's border must be a multiple, for [L,rows,H] intermediates; 1 on CUDA.

    ATen's CPU kernels compute the elements left over from whole vector steps (64 in bf16 with AVX-512, fewer otherwise)
    with scalar functions, whose exp rounds differently: a border inside a step would make such elements of others.
    """
    return 1 if device != "cpu" else 64 // math.gcd(64, rows * H)


def chunk_sizes(L: int, P: int, settings: Settings, quantum: int = 1) -> tuple[int, ...]:
    """Token counts of the chunks, L in all; one chunk unless asked otherwise at P = 1, where no exchange hides.

    Near-equal, the smaller ones first, since nothing hides the first chunk's dispatch; borders at multiples of
    `quantum`. A chunk has at least two tokens (or all of L): a batched GEMM of one matrix takes another cuBLAS path
    than the full batch and rounds differently. Raises ValueError where `A2A_FFN_CHUNKS` does not fit L.
    """
    if settings.sizes:
        total = sum(settings.sizes)
        fits = total == L and min(settings.sizes) >= min(MIN_TOKENS, L)
        require(fits, "A2A_FFN_CHUNKS", settings.sizes, f"sizes of at least {MIN_TOKENS} tokens whose sum is L = {L}")
        return settings.sizes
    wanted = settings.chunks or (DEFAULT_CHUNKS if P > 1 else 1)
    units, rest = divmod(L, quantum)
    count = max(1, min(wanted, L // MIN_TOKENS, units))
    small, larger = divmod(units, count)
    sizes = [quantum * small] * (count - larger) + [quantum * (small + 1)] * larger
    sizes[-1] += rest
    return tuple(sizes)


def whole_norm_gradients(device: str, settings: Settings) -> bool:
    """Whether the norm weights' gradients are taken by one reduction over all chunks: on CPU, or where it is asked for.

    ATen's CPU kernel accumulates them in the tensors' dtype: in bf16 a sum in another order differs by several percent
    from a thousand rows on, the CUDA kernel accumulates in fp32. The one reduction costs a second pass over Z.
    """
    return device == "cpu" if settings.norm_gradients is None else settings.norm_gradients == "whole"


def unsupported(ffn: Any, inputs: torch.Tensor) -> str | None:
    """Why the layer does not take this valid call, or None: the reference answers it then."""
    if ffn.fwd_mode != "dense_v2" or ffn.bwd_mode != "dense_v2":
        return f"fwd_mode/bwd_mode {ffn.fwd_mode}/{ffn.bwd_mode} is not dense_v2"
    if ffn.gemm_backend != "bmm":
        return f"gemm_backend {ffn.gemm_backend} is not bmm"
    for norm in (ffn.norm_x, ffn.norm_gate):
        if norm.weight is None or norm.bias is None:
            return "a norm has no weight or no bias"
        if norm.weight.dtype != inputs.dtype or norm.bias.dtype != inputs.dtype:
            return f"norm weights are {norm.weight.dtype} beside inputs of {inputs.dtype}"
        if norm.weight.numel() * 2 != ffn.w1.shape[2]:
            return "a norm does not span H"
    for parameter in (ffn.w1, ffn.b1, ffn.wout, ffn.bout):
        if parameter.dtype != inputs.dtype:
            return f"weights are {parameter.dtype} beside inputs of {inputs.dtype}"
    if torch.is_autocast_enabled(inputs.device.type):
        return "autocast is on"
    return None
