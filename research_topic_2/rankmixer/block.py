"""One RankMixer block: token mixing and the per-token FFN, each with a residual and a norm after it."""

import torch
import torch.nn.functional as F
from torch import nn

from rankmixer.ffn import PerTokenFFN, he_uniform_, require_positive, small_uniform_


def token_mix(x):
    """Parameter-free token mixing: split every token into T heads and transpose tokens and heads.

    Output token t holds head t of every input token. [B, T, D] -> [B, T, D], with D a multiple of T.
    """
    tokens = x.shape[1]
    return x.unflatten(2, (tokens, -1)).transpose(1, 2).flatten(2)


class DenseSwiGLU(nn.Module):
    """The extra sub-layer of the large block: one SwiGLU network shared by all tokens, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim, hidden, dtype, device):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, dtype=dtype, device=device)
        self.down = nn.Linear(hidden, dim, dtype=dtype, device=device)

    def reset_parameters(self, generator=None):
        for linear in (self.up, self.down):
            he_uniform_(linear.weight, fan_in=linear.in_features, generator=generator)
            small_uniform_(linear.bias, generator=generator)

    def forward(self, x):
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.down(value * F.silu(gate))


class RankMixerBlock(nn.Module):
    """y = norm1(x + token_mix(x)); out = norm2(y + ffn(y)).

    The large block continues with out = norm3(out + dense(out)), ``dense`` a SwiGLU of hidden size k * D that all
    tokens share and that needs no exchange.

    Args:
        tokens, dim, k: T, D and the expansion; D a multiple of T.
        large_block: add the dense sub-layer.
        ffn_options: keyword arguments of `PerTokenFFN`.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(self, tokens, dim, k, *, large_block=False, dtype=torch.bfloat16, device=None, **ffn_options):
        super().__init__()
        require_positive(tokens=tokens, dim=dim, k=k)
        if dim % tokens:
            raise ValueError(f"dim={dim}: must be a multiple of tokens={tokens}, so that a token splits into T heads")
        self.ffn = PerTokenFFN(tokens, dim, k, dtype=dtype, device=device, **ffn_options)
        self.norm1 = nn.LayerNorm(dim, eps=1e-5, dtype=dtype, device=device)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5, dtype=dtype, device=device)
        self.dense = DenseSwiGLU(dim, k * dim, dtype, device) if large_block else None
        self.norm3 = nn.LayerNorm(dim, eps=1e-5, dtype=dtype, device=device) if large_block else None

    def reset_parameters(self, generator=None):
        """He-uniform weights and small biases drawn from ``generator``; norms are the identity."""
        self.ffn.reset_parameters(generator)
        for norm in (self.norm1, self.norm2, self.norm3):
            if norm is not None:
                norm.reset_parameters()
        if self.dense is not None:
            self.dense.reset_parameters(generator)

    def forward(self, x, overlap="none", comp_only=False):
        """[B, T, D] -> [B, T, D]. ``overlap`` and ``comp_only`` as in `PerTokenFFN.forward`."""
        y = self.norm1(x + token_mix(x))
        out = self.norm2(y + self.ffn(y, overlap=overlap, comp_only=comp_only))
        if self.dense is not None:
            out = self.norm3(out + self.dense(out))
        return out
