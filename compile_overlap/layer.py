"""The layer, chunk by chunk: dispatch -> GEMM -> gated norm -> GEMM -> combine, as functional collectives.

Chunks run along L, the token axis: it is the batch axis of both batched GEMMs, so every output row and every weight
gradient is computed by the same products in the same order as in the unchunked layer. Weights are split, not sliced,
so that each weight's gradient is one concatenation.

    X_c = dispatch(x_c)                            [P*B,l,D]
    Z_c = bmm(X_c^T, w1_c) + b1_c                  [l,P*B,2H]
    H_c = LN_x(U_c) * silu(LN_gate(G_c))           [l,P*B,H]     (U_c, G_c) = halves of Z_c
    Y_c = bmm(H_c, wout_c) + bout_c                [l,P*B,D]
    y_c = combine(Y_c)                             [P*B,l,D]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import collectives
from .recipes import local_ffns


def overlapped_ffn(
    x_btd: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    wout: torch.Tensor,
    bout: torch.Tensor,
    norm_x_weight: torch.Tensor,
    norm_x_bias: torch.Tensor,
    norm_gate_weight: torch.Tensor,
    norm_gate_bias: torch.Tensor,
    *,
    sizes: tuple[int, ...],
    P: int,
    group: str | None,
    recipe: str,
    bias: str,
    eps: tuple[float, float],
    exact_gradients: bool,
    triton: tuple[str, ...] = (),
    rounds_as_eager: bool = False,
    comm_scale: int = 1,
) -> torch.Tensor:
    """The expert-parallel FFN of this rank's batch: [B,T,D] -> [B,T,D].

    `sizes` are the chunks' token counts (their sum is L). `group` is the name the functional collectives resolve; None
    replaces each exchange by the local layout change (comp-only, and P = 1). `recipe`, `bias`,
    `exact_gradients`, `triton` and `rounds_as_eager`: see `recipes`.
    `comm_scale` pads the payload of each exchange to that many times its size.
    """
    B, T, D = x_btd.shape
    L = T // P
    sends_bpld = x_btd.reshape(B, P, L, D).split(sizes, dim=2)
    sends = [_pad(s.transpose(0, 1).reshape(P * B, -1, D), comm_scale) for s in sends_bpld]
    dispatched = [_start(s, group, P) for s in sends]

    chunks = local_ffns(
        w1,
        b1,
        wout,
        bout,
        (norm_x_weight, norm_x_bias, norm_gate_weight, norm_gate_bias),
        sizes=sizes,
        rows=P * B,
        recipe=recipe,
        bias=bias,
        eps=eps,
        exact_gradients=exact_gradients,
        triton=triton,
        rounds_as_eager=rounds_as_eager,
    )
    combining = []
    for in_flight, local_ffn in zip(dispatched, chunks):
        x_nld = _wait(in_flight, group, P)[..., :D]
        y_lnd = local_ffn(x_nld.transpose(0, 1))
        combining.append(_start(_pad(y_lnd.transpose(0, 1), comm_scale), group, P))

    outs = [_wait(in_flight, group, P)[..., :D].reshape(P, B, -1, D).transpose(0, 1) for in_flight in combining]
    return torch.cat(outs, dim=2).reshape(B, T, D)


def _pad(payload: torch.Tensor, comm_scale: int) -> torch.Tensor:
    return payload if comm_scale == 1 else F.pad(payload, (0, payload.shape[-1] * (comm_scale - 1)))


def _start(send: torch.Tensor, group: str | None, P: int) -> torch.Tensor:
    return send if group is None else collectives.start(send, group, P)


def _wait(in_flight: torch.Tensor, group: str | None, P: int) -> torch.Tensor:
    return in_flight if group is None else collectives.wait(in_flight, group, P)
