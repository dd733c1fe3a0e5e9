"""The expert-parallel per-token FFN: every token position has its own gated two-layer network.

Per rank, with P = ep_group_size, L = T / P, H = D * k * compute_scale:

    X      = dispatch(inputs)                              [P*B, L, D]
    Z[l]   = X[:, l] @ w1[l] + b1[l];   U, G = halves of Z
    h      = norm_x(U) * silu(norm_gate(G))                [L, P*B, H]
    Y[l]   = h[l] @ wout[l] + bout[l]
    output = combine(Y)                                    [B, T, D]
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rankmixer import backends, plugins
from rankmixer.exchange import combine, dispatch, local_combine, local_dispatch
from rankmixer.pipelines import run_pipeline

OVERLAP_MODES = ("none", "with-sm", "sm-free", "kernel")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def token_ffn(x, w1, b1, wout, bout, gamma_x, beta_x, gamma_gate, beta_gate, eps):
    """The local computation of the rank's tokens.

    Args:
        x: [N, L, D], any strides; w1 [L, D, 2H]; b1 [L, 2H]; wout [L, H, D]; bout [L, D]; norm parameters [H].
        eps: epsilon of both layer norms.

    Returns:
        [L, N, D]: token-major, as the second batched GEMM leaves it.
    """
    z = torch.bmm(x.transpose(0, 1), w1) + b1[:, None, :]
    u, g = z.chunk(2, dim=-1)
    width = (wout.shape[1],)
    normed = F.layer_norm(u, width, gamma_x, beta_x, eps)
    gate = F.silu(F.layer_norm(g, width, gamma_gate, beta_gate, eps))
    return torch.bmm(normed * gate, wout) + bout[:, None, :]


class PerTokenFFN(nn.Module):
    """Per-token FFN whose tokens are spread over an expert-parallel group.

    Args:
        tokens, dim, k: T, D and the expansion; all at least 1, T a multiple of the group's size.
        ep_group: a process group that holds this rank. None: the world group, or a single rank where
            torch.distributed is not initialised.
        comm_scale: pads what the exchanges send to D * comm_scale; results do not change.
        compute_scale: multiplies H.

    Raises:
        ValueError: naming the argument, its value and what is allowed. No collective has run by then.
    """

    def __init__(self, tokens, dim, k, *, ep_group=None, fwd_mode="dense_v2", bwd_mode="dense_v2",
                 gemm_backend="bmm", comm_scale=1, compute_scale=1, dtype=torch.bfloat16, device=None):
        super().__init__()
        require_positive(tokens=tokens, dim=dim, k=k, comm_scale=comm_scale, compute_scale=compute_scale)
        backends.require_backend(gemm_backend)
        backends.require_mode("fwd_mode", fwd_mode)
        backends.require_mode("bwd_mode", bwd_mode)
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype={dtype}: allowed are {', '.join(map(str, FLOAT_DTYPES))}")
        self.ep_group, self.ep_index, self.ep_group_size = resolve_group(ep_group)
        if tokens % self.ep_group_size:
            raise ValueError(f"tokens={tokens}: must be a multiple of the expert-parallel size {self.ep_group_size}")
        self.fwd_mode, self.bwd_mode, self.gemm_backend = fwd_mode, bwd_mode, gemm_backend
        self.comm_scale = comm_scale
        self._plugin_forward = None

        local, hidden = tokens // self.ep_group_size, dim * k * compute_scale
        factory = {"dtype": dtype, "device": device}
        self.w1 = nn.Parameter(torch.empty(local, dim, 2 * hidden, **factory))
        self.b1 = nn.Parameter(torch.empty(local, 2 * hidden, **factory))
        self.wout = nn.Parameter(torch.empty(local, hidden, dim, **factory))
        self.bout = nn.Parameter(torch.empty(local, dim, **factory))
        self.norm_x = nn.LayerNorm(hidden, eps=1e-5, **factory)
        self.norm_gate = nn.LayerNorm(hidden, eps=1e-5, **factory)
        self.reset_parameters()

    def reset_parameters(self, generator=None):
        """He-uniform GEMM weights, small uniform biases, identity norms."""
        for weight, bias in ((self.w1, self.b1), (self.wout, self.bout)):
            he_uniform_(weight, fan_in=weight.shape[1], generator=generator)
            small_uniform_(bias, generator=generator)
        self.norm_x.reset_parameters()
        self.norm_gate.reset_parameters()

    def forward(self, inputs, overlap="none", comp_only=False):
        """Run the layer.

        Args:
            inputs: [B, T, D] of the weights' dtype and device, any strides, never written to. Every rank of the
                group passes the same B.
            overlap: one of ``OVERLAP_MODES``.
            comp_only: replace both exchanges by the local layout change (for measurement only).

        Returns:
            [B, T, D].

        Raises:
            ValueError: for an input or mode that the layer does not take.
            ImportError: when ``overlap="kernel"`` and the plugin cannot be imported.
        """
        self._validate(inputs, overlap)
        if overlap == "kernel":
            if self._plugin_forward is None:
                self.load_plugin()
            return self._plugin_forward(self, inputs, comp_only=comp_only)
        if comp_only:
            return self._forward_comp_only(inputs)
        if overlap == "none" or self.ep_group_size == 1:
            return self._forward_sequential(inputs)
        return run_pipeline(overlap, self, token_ffn, inputs, torch.compiler.is_compiling())

    @torch.compiler.disable
    def load_plugin(self):
        """Resolve the kernel plugin now, so that a later compiled call finds it. Raises ImportError, ValueError."""
        self._plugin_forward = plugins.load_plugin()

    def local_parameters(self):
        """The eight parameters in the order that ``token_ffn`` takes them."""
        return (self.w1, self.b1, self.wout, self.bout,
                self.norm_x.weight, self.norm_x.bias, self.norm_gate.weight, self.norm_gate.bias)

    def _forward_sequential(self, inputs):
        group, peers, scale = self.ep_group, self.ep_group_size, self.comm_scale
        y = self._local(dispatch(inputs, group, peers, scale))
        return combine(y.transpose(0, 1), group, peers, scale)

    def _forward_comp_only(self, inputs):
        """[B, T, D] -> [B, T, D]: exchanges replaced by [B, P, L, D] <-> [P*B, L, D] on the local batch."""
        y = self._local(local_dispatch(inputs, self.ep_group_size))
        return local_combine(y.transpose(0, 1), self.ep_group_size)

    def _local(self, x):
        return token_ffn(x, *self.local_parameters(), self.norm_x.eps)

    def _validate(self, inputs, overlap):
        tokens, dim = self.w1.shape[0] * self.ep_group_size, self.w1.shape[1]
        if overlap not in OVERLAP_MODES:
            raise ValueError(f"overlap={overlap!r}: allowed are {', '.join(OVERLAP_MODES)}")
        if inputs.dim() != 3 or inputs.shape[1] != tokens or inputs.shape[2] != dim or inputs.shape[0] < 1:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: must be [B >= 1, T = {tokens}, D = {dim}]")
        if inputs.dtype != self.w1.dtype:
            raise ValueError(f"inputs of dtype {inputs.dtype}: must be the weights' {self.w1.dtype}")
        if inputs.device != self.w1.device:
            raise ValueError(f"inputs on {inputs.device}: must be on the weights' {self.w1.device}")


def he_uniform_(tensor, fan_in, generator=None):
    """Fill ``tensor`` in place from U(-b, b), b = sqrt(6 / fan_in)."""
    bound = (6.0 / fan_in) ** 0.5
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


def small_uniform_(tensor, bound=0.05, generator=None):
    """Fill a bias in place from U(-bound, bound), so that a lost bias shows in every check."""
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


def require_positive(**values):
    """Raise ValueError for the first value that is not an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")


def resolve_group(ep_group):
    """Return (group or None, rank in it, size). Raises ValueError for a group that does not hold this rank."""
    if not (dist.is_available() and dist.is_initialized()):
        if ep_group is not None:
            raise ValueError(f"ep_group={ep_group!r}: torch.distributed is not initialised, only None is allowed")
        return None, 0, 1
    group = dist.group.WORLD if ep_group is None else ep_group
    index = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    if index < 0:
        raise ValueError(f"ep_group={ep_group!r}: must be a group that holds this rank (global rank {dist.get_rank()})")
    return group, index, dist.get_world_size(group)
