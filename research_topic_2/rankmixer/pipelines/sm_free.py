"""The ``sm-free`` transport: copy engines put each slice into the peers' symmetric memory, no SM moves data.

Protocol of exchange i, on a high-priority stream of its own:

    1. put send[p] into slot i % 2 of rank p, for every p;
    2. one barrier over the group;
    3. copy the own slot i % 2 out into a private buffer.

One barrier per exchange is enough for two slots: a peer writes slot i % 2 again in exchange i + 2, after its barrier
of exchange i + 1, and that barrier needs this rank's arrival, which its stream reaches only after the copy-out of
exchange i. Slots exist per exchange size; the barriers of other sizes in between only add order. A pass that leaves a
size at an odd count adds one barrier, so that a replayed CUDA graph also alternates.
"""

import socket
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rankmixer.pipelines.with_sm import CollectiveTransport

_TRANSPORTS = {}


@dataclass
class _Pool:
    """Two slots of one exchange size in symmetric memory, and the peers' views of where this rank writes."""

    handle: Any
    slots: list
    peer_slots: list
    count: int = 0


@dataclass
class _Handle:
    done: Any
    send: torch.Tensor | None  # kept alive until the exchange is done
    received: torch.Tensor

    def wait(self):
        torch.cuda.current_stream(self.received.device).wait_event(self.done)
        self.send = None
        return self.received


@dataclass
class CopyEngineTransport:
    """Puts into symmetric memory. Built only after the whole group agreed that it works (`make_transport`)."""

    group: Any
    device: torch.device
    pools: dict = field(default_factory=dict)

    def __post_init__(self):
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.rank, self.peers = dist.get_rank(self.group), dist.get_world_size(self.group)

    def start(self, send):
        """Begin exchanging ``send`` [P, ...], contiguous. The first use of a size is collective over the group."""
        pool = self._pool(send.numel(), send.dtype)
        received = torch.empty_like(send)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        slot, pool.count = pool.count % 2, pool.count + 1
        with torch.cuda.stream(self.stream):
            for step in range(1, self.peers + 1):
                peer = (self.rank + step) % self.peers
                pool.peer_slots[slot][peer].copy_(send[peer].view(-1), non_blocking=True)
            pool.handle.barrier(channel=0)
            received.view(-1).copy_(pool.slots[slot], non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        return _Handle(done, send, received)

    def finish(self):
        """End a pass with every size at an even count and the stream joined."""
        with torch.cuda.stream(self.stream):
            for pool in self.pools.values():
                if pool.count % 2:
                    pool.handle.barrier(channel=0)
                    pool.count += 1
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _pool(self, numel, dtype):
        if (numel, dtype) not in self.pools:
            self.pools[numel, dtype] = self._make_pool(numel, dtype)
        return self.pools[numel, dtype]

    def _make_pool(self, numel, dtype):
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(2 * numel, dtype=dtype, device=self.device)
        handle = symmetric_memory.rendezvous(buffer, self.group)
        part = numel // self.peers
        views = [[handle.get_buffer(peer, (part,), dtype, slot * numel + self.rank * part)
                  for peer in range(self.peers)] for slot in range(2)]
        return _Pool(handle, list(buffer.chunk(2)), views)


def make_transport(group, device):
    """The copy-engine transport of ``group``, or the collective one where some rank cannot use it.

    Collective over the group at its first call; the ranks agree on the answer and rank 0 prints a fallback once.
    """
    cached = _TRANSPORTS.get(group.group_name)
    if cached is None or cached[0] is not group:
        reason = _first_obstacle(group, device)
        if reason and dist.get_rank() == 0:
            print(f"sm-free: {reason}; falling back to the with-sm transport", flush=True)
        transport = CollectiveTransport(group) if reason else CopyEngineTransport(group, device)
        cached = _TRANSPORTS[group.group_name] = (group, transport)
    return cached[1]


def transport_in_use(group):
    """"copy-engine" or, after a fallback, "collective"; None where the group has made no transport."""
    cached = None if group is None else _TRANSPORTS.get(group.group_name)
    if cached is None or cached[0] is not group:
        return None
    return "copy-engine" if isinstance(cached[1], CopyEngineTransport) else "collective"


def _first_obstacle(group, device):
    """Why the group cannot put into symmetric memory, or "". The same text on every rank."""
    if device.type != "cuda":
        return "symmetric memory needs CUDA devices"
    places = _gather(group, (socket.gethostname(), device.index))
    if len({host for host, _ in places}) > 1:
        return "the group spans several hosts"
    blocked = [f"GPU {peer}" for _, peer in places
               if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer)]
    return _agree(group, f"no peer access to {', '.join(blocked)}" if blocked else "") or _try_rendezvous(group, device)


def _try_rendezvous(group, device):
    problem = ""
    try:
        CopyEngineTransport(group, device)._make_pool(16 * dist.get_world_size(group), torch.float32)
    except Exception as error:
        problem = f"symmetric memory is not available ({type(error).__name__}: {error})"
    return _agree(group, problem)


def _agree(group, problem):
    return next((text for text in _gather(group, problem) if text), "")


def _gather(group, value):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
