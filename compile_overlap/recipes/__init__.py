"""The chunk's local computation, in the two numeric recipes and the two bias forms.

Under eager execution every bias, norm, gate and product rounds to the tensors' dtype; a graph that Inductor fuses keeps
them in fp32 registers. The two differ in the last bits, so the layer can be written for either reference:

- `eager_exact`: each rounding exactly as eager does it, through opaque operators (`exact`).
- `inductor`: plain operators, which Inductor fuses as it fuses the reference's.

Each with the first and second bias added after the product (`add`) or inside it (`baddbmm`), since the two differ too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import exact

EAGER_EXACT, INDUCTOR = "eager_exact", "inductor"
RECIPES = (EAGER_EXACT, INDUCTOR)
ADD, BADDBMM = "add", "baddbmm"
BIAS_FORMS = (ADD, BADDBMM)


def local_ffn(
    x_lnd: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    wout: torch.Tensor,
    bout: torch.Tensor,
    norms: tuple[torch.Tensor, ...],
    *,
    recipe: str,
    bias: str,
    eps: tuple[float, float],
) -> torch.Tensor:
    """[l,n,D] -> [l,n,D] for one chunk of l tokens; `norms` are gamma_x, beta_x, gamma_gate, beta_gate [H] in fp32."""
    rows = x_lnd.shape[1]
    if recipe == EAGER_EXACT:
        if bias == ADD:
            h_lnh = exact.gated_norm(torch.bmm(x_lnd, w1), b1, norms, eps)
            return torch.bmm(h_lnh, wout) + exact.expand_rows(bout, rows)
        z_lnf = torch.baddbmm(exact.expand_rows(b1, rows), x_lnd, w1)
        return torch.baddbmm(exact.expand_rows(bout, rows), exact.gated_norm(z_lnf, None, norms, eps), wout)
    if bias == ADD:
        return torch.bmm(gated_norm(torch.bmm(x_lnd, w1) + b1.unsqueeze(1), norms, eps), wout) + bout.unsqueeze(1)
    z_lnf = torch.baddbmm(b1.unsqueeze(1), x_lnd, w1)
    return torch.baddbmm(bout.unsqueeze(1), gated_norm(z_lnf, norms, eps), wout)


def gated_norm(z_lnf: torch.Tensor, norms: tuple[torch.Tensor, ...], eps: tuple[float, float]) -> torch.Tensor:
    """LN_x(U) * silu(LN_gate(G)) of z = (U,G) [l,n,2H] in plain operators: [l,n,H]."""
    gamma_x, beta_x, gamma_gate, beta_gate = (t.to(z_lnf.dtype) for t in norms)
    u, g = z_lnf.chunk(2, dim=-1)
    hidden = (u.shape[-1],)
    normed = F.layer_norm(u, hidden, gamma_x, beta_x, eps[0])
    return normed * F.silu(F.layer_norm(g, hidden, gamma_gate, beta_gate, eps[1]))
