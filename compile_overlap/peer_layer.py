"""A whole forward layer in one chunk, through the peers' memory, as one operator (see `passes.one_call`).

A layer without gradients is often nothing but this operator. From the second call on it then is called by itself
(`alone`): AOTAutograd's and Inductor's code around it takes the host as long as two launches, and small layers are bound by
the host.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

import torch

from . import compat, peers  # noqa: F401  with the next two, the operators in `direct`
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
        z = (direct.chunk_bmm_triton if triton else torch.bmm)(rows.transpose(0, 1), w1)
    else:
        z = direct.peer_take_gemm(token, source, w1, 0, 0, length, P, stored, triton, alias)
    norm = z, b1, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate
    if block:
        h, _ = direct.inductor_gated_norm(*norm, rounded, block, warps)
    else:
        h, _ = direct.gated_norm_forward(*norm)
    told = direct.peer_gemm(h, wout, bout, bias_form, 0, length, P, alias)
    results = direct.peer_finish([told], batch, length, width, P, keep, alias)
    if _HEARD.calls is not None:
        left = source, w1, b1, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate, wout, bout
        _HEARD.calls.append(((*left, bias_form, P, stored, triton, rounded, block, warps, keep, alias), results))
    return results


@fake_of(peer_layer)
def _(source, w1, b1, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate, wout, bout, *_):
    return source.new_empty(source.shape)


class _Heard(threading.local):
    calls: list[tuple[tuple[Any, ...], torch.Tensor]] | None = None


_HEARD = _Heard()


@contextlib.contextmanager
def heard() -> Iterator[list[tuple[tuple[Any, ...], torch.Tensor]]]:
    """The operator's calls in this thread meanwhile: (arguments, results) of each."""
    before, _HEARD.calls = _HEARD.calls, []
    try:
        yield _HEARD.calls
    finally:
        _HEARD.calls = before


def alone(
    calls: list[tuple[tuple[Any, ...], torch.Tensor]], tensors: tuple[torch.Tensor | None, ...], outputs: Any
) -> Callable[..., torch.Tensor] | None:
    """The layer of `tensors`, which are `overlapped_ffn`'s, without the compiled code that made these `calls` and returned
    `outputs`; None where that code is more than one call of this operator.

    It is no more where the operator read the layer's own tensors and the layer's output is what the operator returned: there
    is nothing else that it could have computed from. A layer that trains is more, however little of it: its backward.
    """
    if len(calls) != 1 or len(outputs) != 1 or any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        return None
    if outputs[0].requires_grad:
        return None
    (source, *parameters), results = calls[0]
    inputs, w1, b1, wout, bout, *norms = tensors
    epsilons, rest, parameters = parameters[6:8], parameters[10:], (*parameters[:6], *parameters[8:10])
    read, wanted = (source.flatten(), *parameters), (inputs.flatten(), w1, b1, *norms, wout, bout)
    if not (all(map(_is_same, read, wanted)) and _is_same(results.flatten(), outputs[0].flatten())):
        return None
    shape, call = source.shape, direct.peer_layer
    size, stride = outputs[0].size(), outputs[0].stride()

    def layer(inputs, w1, b1, wout, bout, *norms):
        if inputs.is_cuda and inputs.get_device() != torch.cuda.current_device():
            with torch.cuda.device(inputs.device):
                return layer(inputs, w1, b1, wout, bout, *norms)
        results = call(inputs.view(shape), w1, b1, *norms, *epsilons, wout, bout, *rest)
        return compat.reinterpreted(results, size, stride, 0)

    return layer


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same memory, read in the same way."""
    if one is None or other is None:
        return False
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.data_ptr() == other.data_ptr()
