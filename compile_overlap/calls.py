"""A call like one that was answered before is answered by the same compiled layer, without deciding anew.

Deciding again what `api` has decided costs the host 0.2 ms a call, which is more than a layer's first exchange and GEMM
take to launch. Everything that the answer depends on is compared instead: modes, settings and the group by a key, tensors
by Dynamo's guards.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from . import compat
from .compiler import CompiledLayer
from .config import variables
from .layout import check_group, is_altered, parameters_of


class _Answer(NamedTuple):
    tensors_are_alike: Callable[..., bool]
    group: weakref.ref | None
    layer: CompiledLayer


_ANSWERS: weakref.WeakKeyDictionary[Any, dict[tuple, list[_Answer]]] = weakref.WeakKeyDictionary()


def _key(ffn: torch.nn.Module, inputs: torch.Tensor, comp_only: bool) -> tuple:
    """What the answer to a call of `forward_ffn` depends on, but for the tensors' layouts and the group itself."""
    norm_x, norm_gate = ffn.norm_x, ffn.norm_gate  # a module looks its parts up slowly
    return (
        comp_only,
        inputs.shape,
        ffn.ep_group_size,
        ffn.ep_index,
        ffn.fwd_mode,
        ffn.bwd_mode,
        ffn.gemm_backend,
        getattr(ffn, "comm_scale", 1),
        getattr(norm_x, "eps", None),
        getattr(norm_gate, "eps", None),
        type(norm_x),
        type(norm_gate),
        is_altered(norm_x) or is_altered(norm_gate),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),  # not of the inputs' device, which may be one that has no autocast
        torch.is_autocast_enabled("cpu"),
        variables(),
    )


def known_layer(ffn: Any, inputs: Any, comp_only: bool) -> tuple[CompiledLayer, tuple[torch.Tensor, ...]] | None:
    """The layer that answered a call like this one on the same group, and the parameters it takes.

    Raises ValueError if the group is unfit by now.
    """
    known = _ANSWERS.get(ffn) if isinstance(ffn, torch.nn.Module) and isinstance(inputs, torch.Tensor) else None
    if not known:
        return None
    try:
        answers = known.get(_key(ffn, inputs, comp_only), ())
        parameters = parameters_of(ffn) if answers else ()
    except AttributeError:  # a part is gone; the checks of a new call say which
        return None
    for answer in answers:
        if answer.tensors_are_alike(inputs, *parameters):
            if answer.group is None or _is_alive(answer.group(), _group(ffn)):
                return answer.layer, parameters
            check_group(ffn.ep_group, ffn.ep_index, ffn.ep_group_size)
    return None


def keep(ffn: torch.nn.Module, inputs: torch.Tensor, comp_only: bool, layer: CompiledLayer) -> None:
    """Let `layer` answer calls like this one from now on."""
    group = weakref.ref(_group(ffn)) if ffn.ep_group_size > 1 else None
    answer = _Answer(compat.tensor_guards((inputs, *parameters_of(ffn))), group, layer)
    _ANSWERS.setdefault(ffn, {}).setdefault(_key(ffn, inputs, comp_only), []).insert(0, answer)


def forget(layer: Any) -> None:
    """Let `layer` answer no call any more."""
    for known in _ANSWERS.values():
        for key, answers in list(known.items()):
            known[key] = [answer for answer in answers if answer.layer is not layer]
            if not known[key]:
                del known[key]


def _group(ffn: Any) -> Any:
    return dist.group.WORLD if ffn.ep_group is None else ffn.ep_group


def _is_alive(answered: Any, group: Any) -> bool:
    return group is not None and answered is group and compat.is_registered(group)


def reset() -> None:
    """Forget every answer."""
    _ANSWERS.clear()
