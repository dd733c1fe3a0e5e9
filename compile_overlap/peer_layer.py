"""A whole forward layer in one chunk, through the peers' memory, as one operator (see `passes.one_call`)."""

from __future__ import annotations

import torch

from . import peers  # noqa: F401  with the next two, the operators in `direct`
from .kernels import chunk_gemm_triton, inductor_gated_norm  # noqa: F401
from .operators import direct, fake_of, operator
from .recipes import exact  # noqa: F401


@operator
def peer_layer(
    source: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, gamma_x: torch.Tensor, beta_x: torch.Tensor,
    gamma_gate: torch.Tensor, beta_gate: torch.Tensor, eps_x: float, eps_gate: float, wout: torch.Tensor,
    bout: torch.Tensor | None, bias_form: int, P: int, stored: int, triton: bool, rounded: bool, block: int, warps: int,
    keep: bool, alias: str,
) -> torch.Tensor:  # fmt: skip
    """The expert-parallel FFN of `source` [B,P,L,D]: its results [B,P,L,D], with `keep` a private copy (`peer_finish`).

    `stored`: tokens that a kernel puts at once (`peer_put`). `triton`: the first GEMM is by our kernel. `rounded`, `block`,
    `warps`: the gated norm sums in Inductor's order (`inductor_gated_norm`); in ATen's where `block` is 0.
    """
    batch, _, length, width = source.shape
    token = direct.peer_put(source, 0, 0, length, P, stored, alias)
    if stored == length:
        rows = direct.peer_take(token, source, 0, 0, length, P, stored, False, alias)
        z = chunk_gemm_triton.product(rows.transpose(0, 1), w1, triton)
    else:
        z = direct.peer_take_gemm(token, source, w1, 0, 0, length, P, stored, triton, alias)
    norm = z, b1, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate
    if block:
        h, _ = direct.inductor_gated_norm(*norm, rounded, block, warps)
    else:
        h, _ = direct.gated_norm_forward(*norm)
    told = direct.peer_gemm(h, wout, bout, bias_form, 0, length, P, alias)
    return direct.peer_finish([told], batch, length, width, P, keep, alias)


@fake_of(peer_layer)
def _(source, w1, b1, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate, wout, bout, *_):
    return source.new_empty(source.shape)
