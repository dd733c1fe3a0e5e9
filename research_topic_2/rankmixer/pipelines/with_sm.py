"""The ``with-sm`` transport: asynchronous collectives. NCCL's kernels run on SMs beside the GEMMs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class _Handle:
    work: Any
    send: torch.Tensor | None  # kept alive until the exchange is done
    received: torch.Tensor

    def wait(self):
        self.work.wait()
        self.send = None
        return self.received


class CollectiveTransport:
    """``dist.all_to_all_single(async_op=True)`` on the group's own stream (gloo's threads on CPU)."""

    def __init__(self, group):
        self.group = group

    def start(self, send):
        """Begin exchanging ``send`` [P, ...], contiguous. ``wait()`` on the result orders the current stream."""
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self.group, async_op=True)
        return _Handle(work, send, received)

    def finish(self):
        """Nothing outlives the handles."""


def make_transport(group, device):
    """The transport for ``group``. The device does not matter: the group's backend decides."""
    return CollectiveTransport(group)
