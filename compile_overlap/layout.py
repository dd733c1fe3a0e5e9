"""Shapes of one call and the checks on them: everything that bad input can get wrong is refused here, on every rank.

P ranks of the expert-parallel group hold L = T/P tokens of the token axis each, H = D*k comes from `w1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARAMETERS = ("w1", "b1", "wout", "bout", "norm_x.weight", "norm_x.bias", "norm_gate.weight", "norm_gate.bias")


@dataclass(frozen=True)
class Layout:
    """Sizes of one call: inputs [B,T,D], dispatched [P*B,L,D], w1 [L,D,2H], wout [L,H,D]."""

    P: int
    B: int
    T: int
    D: int
    H: int

    @property
    def L(self) -> int:
        return self.T // self.P

    @property
    def rows(self) -> int:
        """Rows of each token's GEMM: P*B."""
        return self.P * self.B

    def exchange_bytes(self, itemsize: int) -> int:
        """Bytes one rank sends in one dispatch or combine, its own slice excluded."""
        return self.B * self.T * self.D * itemsize * (self.P - 1) // self.P


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise the `ValueError` that names an argument, its value and what is allowed."""
    if not condition:
        raise ValueError(f"{name} = {value}: must be {allowed}")


def check_call(ffn: Any, inputs: torch.Tensor) -> Layout:
    """Validate one call and return its layout. No collective runs before it. Raises ValueError."""
    require(isinstance(ffn, torch.nn.Module), "ffn", type(ffn).__name__, "a torch.nn.Module")
    require(isinstance(inputs, torch.Tensor), "inputs", type(inputs).__name__, "a tensor [B,T,D]")
    require(inputs.dim() == 3, "inputs.shape", tuple(inputs.shape), "[B,T,D]")
    require(inputs.layout == torch.strided, "inputs.layout", inputs.layout, "strided")
    require(inputs.dtype in DTYPES, "inputs.dtype", inputs.dtype, "bfloat16, float16 or float32")
    P = getattr(ffn, "ep_group_size", None)
    require(_is_positive(P), "ffn.ep_group_size", P, "a positive integer")
    batch, tokens, dim = inputs.shape
    require(batch >= 1, "inputs.shape[0] (B)", batch, "at least 1")
    require(tokens % P == 0 and tokens >= P, "inputs.shape[1] (T)", tokens, f"a multiple of ep_group_size = {P}")
    _check_parameters(ffn, inputs.device)
    require(ffn.w1.dim() == 3, "ffn.w1.shape", tuple(ffn.w1.shape), "[L,D,2H]")
    L, D, twice_hidden = ffn.w1.shape
    require(dim == D, "inputs.shape[2] (D)", dim, f"the D of ffn.w1, {D}")
    require(tokens == L * P, "inputs.shape[1] (T)", tokens, f"L*P = {L}*{P}, as ffn.w1 and the group say")
    require(twice_hidden % 2 == 0 and twice_hidden >= 2, "ffn.w1.shape[2] (2H)", twice_hidden, "even and at least 2")
    H = twice_hidden // 2
    expected = {"b1": (L, 2 * H), "wout": (L, H, D), "bout": (L, D)}
    for name, shape in expected.items():
        got = tuple(getattr(ffn, name).shape)
        require(got == shape, f"ffn.{name}.shape", got, str(shape))
    scale = getattr(ffn, "comm_scale", 1)
    require(_is_positive(scale), "ffn.comm_scale", scale, "a positive integer")
    check_group(ffn.ep_group, ffn.ep_index, P)
    return Layout(P=P, B=batch, T=tokens, D=D, H=H)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_parameters(ffn: Any, device: torch.device) -> None:
    """Validate that `ffn` has its weights and norms, on the inputs' device; a norm's weight or bias may be None."""
    tensors = {f"ffn.{name}": getattr(ffn, name, None) for name in ("w1", "b1", "wout", "bout")}
    for name, tensor in tensors.items():
        require(isinstance(tensor, torch.Tensor), name, type(tensor).__name__, "a tensor")
    for name in ("norm_x", "norm_gate"):
        norm = getattr(ffn, name, None)
        whole = isinstance(norm, torch.nn.Module) and hasattr(norm, "weight") and hasattr(norm, "bias")
        require(whole, f"ffn.{name}", type(norm).__name__, "a norm with weight and bias")
        for part in ("weight", "bias"):
            if getattr(norm, part) is not None:
                tensors[f"ffn.{name}.{part}"] = getattr(norm, part)
    for name, tensor in tensors.items():
        require(tensor.device == device, f"inputs.device = {device}; {name}.device", tensor.device, "the same")


def check_group(group: Any, index: Any, size: int) -> None:
    """Validate that this rank is member `index` of a group of `size` ranks; None is the default group."""
    if size == 1:
        return
    import torch.distributed as dist

    require(dist.is_available() and dist.is_initialized(), "ffn.ep_group_size", size, "1 without a process group")
    if group is None:
        group = dist.group.WORLD
    member = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
    require(member, "ffn.ep_group", group, "a process group that this rank belongs to")
    require(dist.get_world_size(group) == size, "ffn.ep_group_size", size, f"{dist.get_world_size(group)}, the group's")
    require(dist.get_rank(group) == index, "ffn.ep_index", index, f"{dist.get_rank(group)}, this rank in the group")


def parameters_of(ffn: Any) -> tuple[torch.Tensor, ...]:
    """The eight parameters in the order the layer takes them (`PARAMETERS`)."""
    norm_x, norm_gate = ffn.norm_x, ffn.norm_gate
    return (ffn.w1, ffn.b1, ffn.wout, ffn.bout, norm_x.weight, norm_x.bias, norm_gate.weight, norm_gate.bias)


def is_altered(norm: Any) -> bool:
    """Whether a norm has hooks, or a `forward` of its own instead of its class's: only a call of it runs them."""
    own = getattr(norm, "__dict__", {})  # of what is no norm, too: this is asked before it is refused
    hooked = own.get("_forward_hooks") or own.get("_forward_pre_hooks")
    return bool("forward" in own or hooked or own.get("_backward_hooks") or own.get("_backward_pre_hooks"))


def eps_of(ffn: Any) -> tuple[float, float]:
    """The epsilons of norm_x and norm_gate; a norm that does not say has LayerNorm's default, 1e-5."""
    return getattr(ffn.norm_x, "eps", 1e-5), getattr(ffn.norm_gate, "eps", 1e-5)
