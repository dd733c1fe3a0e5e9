"""Named profiler ranges around the operators that exchange through the peers' memory, for `torch.profiler` and NVTX.

    dispatch 0, combine 0       what starts chunk 0's exchanges; the kernels and copies launched inside belong to them
    wait dispatch 0             what waits for its rows
    combine' 0, dispatch' 0     the same of their gradients, in the backward

Functional collectives have no place of ours for a range: they are the compiler's own calls. Their kernels are named
afterwards, by their place in the schedule (`measure.naming`).

Without a profiler a range is a test of one flag in the operator's Python code.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Callable

import torch
from torch.autograd import profiler

_OURS = re.compile(r"(wait |gemm, wait )?(dispatch|combine)'?( \d+)?$")
_CHUNK_AT: dict[tuple[str, int], int] = {}  # by alias and first token, of the calls that are being profiled


def is_ours(name: str) -> bool:
    return _OURS.match(name) is not None


def exchange(number: int, chunk: int | None, backward: bool) -> str:
    """The name of a chunk's first or second exchange, in the terms of `schedule`."""
    kind = ("dispatch", "combine")[(number == 2) != backward]
    return f"{kind}{chr(39) * backward}{'' if chunk is None else f' {chunk}'}"


def _here(number: int, chunk: int | None) -> str:
    return exchange(number, chunk, torch._C._current_graph_task_id() != -1)


def _put(source: Any, chunk: int, first: int, length: int, P: int, stored: int, alias: str) -> str:
    _CHUNK_AT[alias, first] = chunk
    return _here(1, chunk)


_NAMES: dict[str, Callable[..., str]] = {
    "peer_put": _put,
    "_send": lambda here, source, chunk, *_: _here(1, chunk),
    "peer_take": lambda token, source, chunk, *_: f"wait {_here(1, chunk)}",
    "peer_take_gemm": lambda token, source, right, chunk, *_: f"gemm, wait {_here(1, chunk)}",
    "peer_gemm": lambda left, right, bias, form, first, tokens, P, alias: _here(2, _CHUNK_AT.get((alias, first))),
    "peer_finish": lambda *_: f"wait {_here(2, None)}",
}


def named(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation, inside a range while a profiler runs; itself if it is none of an exchange."""
    name_of = _NAMES.get(kernel.__name__)
    if name_of is None:
        return kernel

    @functools.wraps(kernel)
    def run(*arguments: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return kernel(*arguments)
        with profiler.record_function(name_of(*arguments)):
            return kernel(*arguments)

    return run
