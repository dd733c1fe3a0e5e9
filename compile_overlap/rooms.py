"""The buffers through which a group's ranks exchange: who shares them, how they are made, and what keeps a group from it.

Ranks of one host form a domain: they address each other's buffers, two for each of them (`Room`). Ranks of other hosts
are away: their rows travel by the group's own collectives (`Away`), which the operators of `peers` start and wait for.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from . import compat
from . import group as groups
from .kernels import gemm_combine
from .kernels.meeting import FLAG_BYTES, Meeting

RENDEZVOUS_S = 60
_SMALLEST = 1 << 20


class Away:
    """The exchange with the ranks of other hosts: one all-to-all, in which the own host's ranks have no part."""

    def __init__(self, group: Any, ranks: tuple[int, ...], device: torch.device):
        self.group, self.ranks = group, ranks
        self.index = torch.tensor(ranks, dtype=torch.int64, device=device)
        self.travelling: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def start(self, key: Any, rows: torch.Tensor) -> None:
        """Send `rows` [B,A,...], of which [:,a] goes to the a-th of these ranks; `wait(key)` has what they sent."""
        send = rows.transpose(0, 1).contiguous()
        received = torch.empty_like(send)
        splits = [send.shape[1] * (rank in self.ranks) for rank in range(dist.get_world_size(self.group))]
        flat_send, flat_received = send.flatten(0, 1), received.flatten(0, 1)
        work = dist.all_to_all_single(flat_received, flat_send, splits, splits, group=self.group, async_op=True)
        self.travelling[key] = work, send, received

    def wait(self, key: Any) -> torch.Tensor:
        """The rows [A,B,...] that arrived."""
        work, _, received = self.travelling.pop(key)
        work.wait()
        return received


class Room:
    """A rank's share of the symmetric buffers of its domain: bytes [nbytes], an inbox and results, and the others'.

    `domain`: ranks of the group on this host, in the order of the handles. `away`: the others, if there are any.
    `per_host`: how many ranks a pretended host has (`domain_of`).
    """

    def __init__(
        self, buffers: list[torch.Tensor], handles: list[Any], group: Any, domain: tuple[int, ...],
        per_host: int | None = None,
    ):  # fmt: skip
        self.inbox, self.results = (buffer[:-FLAG_BYTES] for buffer in buffers)
        self.inbox_handle, self.results_handle = handles
        self.nbytes, device = self.inbox.numel(), self.inbox.device
        self.size, self.rank, self.domain = dist.get_world_size(group), dist.get_rank(group), domain
        self.per_host = per_host
        self.timeout_ms = int(1000 * compat.timeout_s(group))  # of a wait for a signal
        self.inbox_meeting, self.results_meeting = (
            Meeting(
                torch.tensor([address + self.nbytes for address in handle.buffer_ptrs], device=device),
                torch.zeros(2, dtype=torch.int32, device=device), domain.index(self.rank), self.timeout_ms,
            )
            for handle in handles
        )  # fmt: skip
        self.inboxes = dict(zip(domain, self.inbox_handle.buffer_ptrs))
        self.inbox_addresses = self._addresses(self.inboxes)
        elsewhere = tuple(rank for rank in range(self.size) if rank not in domain)
        self.away = Away(group, elsewhere, device) if elsewhere else None
        self.outbox = torch.empty_like(self.results, memory_format=torch.contiguous_format) if elsewhere else None
        self._result_addresses: dict[int, torch.Tensor] = {}
        self._parts: dict[tuple, torch.Tensor] = {}
        self.sending = torch.cuda.Stream(device)
        self.sent: dict[int, torch.cuda.Event] = {}
        self.under_way: set[int] = set()  # chunks put with a signal, which nothing has waited for
        self.stream: int | None = None  # of the last call, its handle
        self.followed: torch.cuda.Stream | None = None  # that stream: `ExternalStream(0)` is not the default one

    def follow(self) -> None:
        """A call begins on the current stream: behind all that the stream of the call before has been given."""
        stream = compat.current_raw_stream()
        if stream != self.stream:
            current = torch.cuda.current_stream()
            if self.followed is not None:
                current.wait_stream(self.followed)
            self.stream, self.followed = stream, current

    def _addresses(self, by_rank: dict[int, int]) -> torch.Tensor:
        """An address for each rank of the group, on the device; 0 where there is none."""
        return torch.tensor([by_rank.get(rank, 0) for rank in range(self.size)], device=self.inbox.device)

    def part(self, buffer: str, dtype: torch.dtype, begin: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous part of `inbox`, `results` or `outbox`, that begins at element `begin`."""
        key = buffer, dtype, begin, shape
        if key not in self._parts:
            with torch.inference_mode(False):  # as `make_room`
                flat = getattr(self, buffer).view(dtype)
                self._parts[key] = flat[begin : begin + math.prod(shape)].view(shape)
        return self._parts[key]

    @functools.cached_property
    def others(self) -> list[tuple[int, int]]:
        """(rank in the group, rank in the domain) of the domain's other ranks, the next one first."""
        own = self.domain.index(self.rank)
        places = [(own + step) % len(self.domain) for step in range(1, len(self.domain))]
        return [(self.domain[place], place) for place in places]

    def result_addresses(self, share: int) -> torch.Tensor:
        """Where each rank's results begin, [P]; rows for ranks away go to the outbox [B,P,...], a block for each of them.

        `share`: bytes of a rank's block of a row of the results. My rows stand in my block of a peer's results, and in
        its own block of the outbox for a rank that is away.
        """
        if share not in self._result_addresses:
            addresses = dict(zip(self.domain, self.results_handle.buffer_ptrs))
            for rank in self.away.ranks if self.away else ():
                addresses[rank] = self.outbox.data_ptr() + (rank - self.rank) * share
            self._result_addresses[share] = self._addresses(addresses)
        return self._result_addresses[share]


# By name, as operators find them; a name may be given to another group later, whose rooms are its own.
_ROOMS: dict[str, tuple[weakref.ref, list[Room]]] = {}
_DOMAINS: weakref.WeakKeyDictionary[Any, dict[int | None, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def room(alias: str) -> Room:
    """The newest room of the group that an alias names."""
    return _ROOMS[alias.split("]:", 1)[1]][1][-1]


def host() -> str:
    """What tells this process's host from others, as NCCL does: `NCCL_HOSTID`, or the host's name and its boot.

    The name alone is not enough: the hosts of a cluster may all have the one of their image.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def domain_of(group: Any, P: int, device: torch.device, per_host: int | None = None) -> tuple[int, ...]:
    """The ranks of the group that share this rank's host; found at the first call, in which all ranks take part.

    `per_host` pretends that so many consecutive ranks make a host; ranks of different hosts never share one.
    """
    group = dist.group.WORLD if group is None else group
    known = _DOMAINS.setdefault(group, {})
    if per_host not in known:
        own = dist.get_rank(group)
        hosts = groups.gathered(group, P, device, (host(), own // per_host if per_host else 0))
        known[per_host] = tuple(rank for rank, each in enumerate(hosts) if each == hosts[own])
    return known[per_host]


def obstacle(
    group: Any, P: int, device: torch.device, dtype: torch.dtype, per_host: int | None = None
) -> str | None:
    """Why this group cannot exchange through its members' memory, or None; agreed by all its ranks, which all ask."""
    domain = domain_of(group, P, device, per_host)
    mine = own_obstacle(device, dtype) or ("a rank is alone on its host" if len(domain) == 1 else None)
    return None if groups.all_ranks(group, P, device, mine is None) else mine or "another rank cannot"


def own_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps this rank from its peers' memory, whoever they are; no rank is asked."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "no CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} has no kernel"
    if gemm_combine.triton is None:
        return "Triton is not installed"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1 keeps the GPUs apart"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the kernels need compute capability 9.0"
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "the GPUs cannot read each other's memory"
    return None


@torch.inference_mode(False)  # made in a call under inference mode, they are written to in others
def make_room(group: Any, P: int, nbytes: int, device: torch.device, per_host: int | None = None) -> str | None:
    """Make sure that the group has buffers of `nbytes`; all its P ranks call this alike. Returns why it cannot, or None.

    Sizes double, and the smaller ones are kept (a captured CUDA graph may use them): in all at most twice the largest.
    A rank that fails keeps none of the others for longer than `RENDEZVOUS_S`.
    """
    group = dist.group.WORLD if group is None else group
    owner, rooms = _ROOMS.get(group.group_name, (None, []))
    if owner is None or owner() is not group:
        rooms = []
        _ROOMS[group.group_name] = weakref.ref(group), rooms
    if rooms and rooms[-1].nbytes >= nbytes and rooms[-1].per_host == per_host:
        return None
    domain = domain_of(group, P, device, per_host)
    size = max(_SMALLEST, 1 << (nbytes - 1).bit_length(), rooms[-1].nbytes if rooms else 0)
    local, failure = groups.attempt(group, P, device, lambda: _local_group(group, domain))
    buffers, handles = [], []
    if failure is None:
        buffers, failure = groups.attempt(group, P, device, lambda: [_allocate(size, device) for _ in range(2)])
    for buffer in buffers or ():
        handle, failure = groups.attempt(group, P, device, lambda buffer=buffer: _rendezvous(buffer, local))
        if failure is not None:
            break
        handles.append(handle)
    if failure is not None:
        return f"no symmetric memory of {size} bytes: {failure}"
    rooms.append(Room(buffers, handles, group, domain, per_host))
    return None


_LOCAL: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _local_group(group: Any, domain: tuple[int, ...]) -> Any:
    """The group of the domain's ranks: the whole group, or one made for it, over which nothing but handles travel."""
    if len(domain) == dist.get_world_size(group):
        return group
    known = _LOCAL.setdefault(group, {})
    if domain not in known:
        everyone = dist.get_process_group_ranks(group)
        members = [everyone[rank] for rank in domain]
        # By gloo: NCCL would split the communicator, in which ranks of other hosts would have to take part.
        known[domain] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return known[domain]


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """A buffer with the flags of `meeting` behind it, which are down before any other rank can raise them."""
    buffer = symmetric_memory.empty(nbytes + FLAG_BYTES, dtype=torch.uint8, device=device)
    buffer[nbytes:].zero_()
    if buffer.is_cuda:
        torch.cuda.synchronize(device)
    return buffer


def _rendezvous(buffer: torch.Tensor, group: Any) -> Any:
    """The handle by which all ranks of the group address each other's buffers; all of them call this."""
    store = compat.symmetric_memory_store(group)
    usual = store.timeout
    store.set_timeout(datetime.timedelta(seconds=RENDEZVOUS_S))
    try:
        return symmetric_memory.rendezvous(buffer, group.group_name)
    finally:
        store.set_timeout(usual)
