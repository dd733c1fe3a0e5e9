"""The exchange as functional collectives: a start and a wait that autograd keeps apart.

`start` begins an All-to-All, `wait` gives its result; between the two other work may run. They are each other's
derivative: the backward of `wait` starts the exchange of the gradient, the backward of `start` waits for it. So the
backward graph has the same freedom as the forward one, and a wait always applies to the collective's own output
(no view between), which is what Inductor needs to see that a buffer is in flight.
"""

from __future__ import annotations

import torch
from torch.autograd import Function

_ops = torch.ops._c10d_functional


def _start(send: torch.Tensor, group: str, size: int) -> torch.Tensor:
    splits = [send.shape[0] // size] * size
    return _ops.all_to_all_single(send.contiguous(), splits, splits, group)


class _Start(Function):
    @staticmethod
    def forward(ctx, send, group, size):
        return _start(send, group, size)

    @staticmethod
    def backward(ctx, grad_in_flight):
        return _ops.wait_tensor(grad_in_flight), None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx, in_flight, group, size):
        ctx.group, ctx.size = group, size
        return _ops.wait_tensor(in_flight)

    @staticmethod
    def backward(ctx, grad):
        return _start(grad, ctx.group, ctx.size), None, None


def start(send_nld: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Begin the exchange of `send_nld` [P*B,l,D] in `size` equal blocks of rows: block p goes to rank p of `group`.

    The result [P*B,l,D] is in flight until `wait`; block p of it comes from rank p.
    """
    return _Start.apply(send_nld, group, size)


def wait(in_flight: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The received tensor of the exchange that `start` began; call it exactly once, on `start`'s own result."""
    return _Wait.apply(in_flight, group, size)
