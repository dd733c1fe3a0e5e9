"""Machines to simulate: a GPU, the links between GPUs and hosts, and what the software on them costs.

Where the numbers come from:

- **H200**: measured on two of them (NV18 link, torch 2.11.0): `flops_per_s` and `overhead_k` are those of cuBLAS's
  GEMMs of the default workload by trace (740 TFLOP/s at K = 1280, 785 at K = 7680), `bytes_per_s` a copy of 80 MiB.
  The data sheet says 989 TFLOP/s dense bf16, 4.8 TB/s, 132 SMs.
- **H100 (SXM), H800, H20**: data sheets (989, 989, 148 TFLOP/s dense bf16; 3.35, 3.35, 4.0 TB/s; 132, 132, 78 SMs),
  times the share of its data sheet that an H200 reached. Never measured.
- **NVLink**: an NCCL all-to-all of two H200s; H100 and H20 have the same 900 GB/s, an H800 400 GB/s, scaled alike.
- **Host shared memory, TCP on loopback**: NCCL between the same two H200s with `NCCL_P2P_DISABLE=1`, and with
  `NCCL_SHM_DISABLE=1` besides.
- **Network cards**: 400 Gb/s each by their data sheet, without loss, and NVLink's latency. Never measured.

What calibration fitted is named in `scripts/calibrate.py`, which prints and judges it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from .costs import Costs
from .schedule import BACKWARD, FORWARD

TILES = ((128, 256), (256, 128), (320, 128), (192, 128), (128, 128))  # rows x columns of cuBLAS's kernels in the traces


@dataclass(frozen=True)
class Gpu:
    """`flops_per_s`: rate of dense 16-bit GEMMs whose tiles fill all `sms` and whose K is long. `overhead_k`: what
    beginning and ending a tile costs, as further K. `bytes_per_s`: rate of streaming kernels."""

    name: str
    sms: int
    flops_per_s: float
    bytes_per_s: float
    overhead_k: int = 96

    def gemm_seconds(
        self, batch: int, rows: int, inner: int, columns: int, itemsize: int, reserved_sms: int = 0
    ) -> float:
        """Time of [batch,rows,inner] x [batch,inner,columns]: waves of the best tile over the SMs, or its traffic.

        Tiles cut off by the last row fill the gaps of the last wave; each costs its share of a whole one.
        """
        sms = max(1, self.sms - reserved_sms)
        per_sm = self.flops_per_s / self.sms
        waves = min(_waves(batch, rows, columns, tile, sms) * math.prod(tile) for tile in TILES)
        traffic = itemsize * batch * (rows * inner + inner * columns + rows * columns)
        return max(waves * 2 * (inner + self.overhead_k) / per_sm, traffic / self.bytes_per_s)


def _waves(batch: int, rows: int, columns: int, tile: tuple[int, int], sms: int) -> float:
    """How many tiles one SM computes, in whole tiles and parts of cut ones, of 64 rows at least."""
    height, width = tile
    across = batch * -(-columns // width)
    whole, cut = divmod(rows, height)
    part = max(cut, 64) / height if cut else 0.0
    if not whole:
        return math.ceil(across / sms) * part
    waves = math.ceil(whole * across / sms)
    gaps = waves * sms - whole * across
    return waves + max(0.0, across * part - gaps) / sms


@dataclass(frozen=True)
class Link:
    """`bytes_per_s`: what a rank sends in one direction in an all-to-all. `latency_s`: of an exchange in a layer.
    `beside`: by how much an exchange is slower beside computation. `sm_share`: SMs' share that it takes from a GEMM."""

    name: str
    bytes_per_s: float
    latency_s: float
    beside: float = 1.0
    sm_share: float = 0.0


CARD = Link("400 Gb/s network card", 50e9, 7.82e-5, 1.08, 0.13)


@dataclass(frozen=True)
class Passes:
    """What the kernels beside the GEMMs take, in traversals of their least operand at the memory's rate.

    `forward`, `backward`: of the gated norm and biases, in [L,P*B,H]. `block_forward`, `block_backward`: of the block
    around the layer (two norms, token mixing, residuals), in [B,T,D].
    """

    forward: float
    backward: float
    block_forward: float
    block_backward: float

    def of(self, direction: str) -> tuple[float, float]:
        """(the layer's, the block's) in a direction."""
        return (self.forward, self.block_forward) if direction == FORWARD else (self.backward, self.block_backward)


@dataclass(frozen=True)
class Layer:
    """One implementation of the layer: `gemms`, the share of the GPU's GEMM rate that it reaches; the host's time for
    each kernel, each functional collective (start and wait) and a call; kernels of a gated norm and of each half of
    the block; the traffic of both."""

    gemms: float
    launch_s: float
    collective_s: float
    call_s: float
    epilogue_kernels: int
    block_kernels: int
    passes: Passes


@dataclass(frozen=True)
class Stack:
    """Software: the sequential `reference` and our layer, `own`.

    `chunk_s`: what each chunk beyond the first costs the device, forward and backward: kernels' tails, sums of partial
    gradients. `peer_gemms`: rate of the GEMM that stores to the peers over cuBLAS's. `peer_s`: the host's time for an
    exchange through the peers' memory, half of it where it starts.
    """

    name: str
    reference: Layer
    own: Layer
    chunk_s: tuple[float, float]
    peer_s: float
    peer_gemms: float = 0.9

    def chunk_seconds(self, direction: str) -> float:
        return self.chunk_s[direction == BACKWARD]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind: those of a host are joined by `local`, hosts by `cards` network cards each, `card` one of them.

    `memory_bytes_per_s`: what a rank's stores and copies into its host's peers' memory reach; None where they cannot.
    """

    gpu: Gpu
    local: Link
    stack: Stack
    card: Link
    cards: int
    gpus_per_host: int
    memory_bytes_per_s: float | None

    def hosts(self, P: int) -> int:
        return -(-P // self.gpus_per_host)

    def local_ranks(self, P: int) -> int:
        """Ranks on each host. Raises ValueError unless they are equally many."""
        hosts = self.hosts(P)
        if P % hosts:
            raise ValueError(f"P = {P}: must be a multiple of its {hosts} hosts of {self.gpus_per_host} GPUs")
        return P // hosts

    def network(self, P: int) -> Link:
        """The part of a host's cards that each of its ranks has."""
        return replace(self.card, bytes_per_s=self.card.bytes_per_s * self.cards / self.local_ranks(P))

    def with_costs(self, costs: Costs) -> Machine:
        """This machine with what was measured on a group: one link between all its ranks, and the GEMM rate.

        How an exchange gets on beside computation is taken from the known link that is nearest in bandwidth.
        """
        near = min(LINKS.values(), key=lambda link: abs(math.log(link.bytes_per_s / costs.bytes_per_s)))
        local = replace(near, bytes_per_s=costs.bytes_per_s, latency_s=costs.latency_s)
        gpu = replace(self.gpu, flops_per_s=costs.flops_per_s / PROBE_SHARE)
        return replace(self, gpu=gpu, local=local, gpus_per_host=2**30)


# `costs` times a short GEMM with its launch and rounds its rate: 560 TFLOP/s on an H200, whose long ones reach 795.
PROBE_SHARE = 0.705

_SHARE_OF_SHEET = 795 / 989, 4.1 / 4.8
H200 = Gpu("H200", 132, 795e12, 4.1e12)


def _by_data_sheet(name: str, sms: int, flops_per_s: float, bytes_per_s: float) -> Gpu:
    return Gpu(name, sms, flops_per_s * _SHARE_OF_SHEET[0], bytes_per_s * _SHARE_OF_SHEET[1])


GPUS = {
    gpu.name: gpu
    for gpu in (
        _by_data_sheet("H20", 78, 148e12, 4.0e12),
        _by_data_sheet("H100", 132, 989e12, 3.35e12),
        _by_data_sheet("H800", 132, 989e12, 3.35e12),
        H200,
    )
}


# The host's time for an exchange through the peers' memory, by its pieces (`small_host.log`).
PEER_S = 7e-5


class Fitted(NamedTuple):
    """What `scripts/calibrate.py` fits: rates of the two links, an exchange's latency in a layer, traversals of the
    gated norm's backward with the sums beside it (Inductor's, ATen's, ours), and, of eager callers, the host's time for
    a kernel, a collective, and an exchange through the peers' memory, with all that a small layer's call takes."""

    nvlink_bytes_per_s: float = 225e9
    shared_memory_bytes_per_s: float = 23e9
    latency_s: float = 7.82e-5
    inductor_backward: float = 28.8
    own_backward: float = 23.5
    aten_backward: float = 40.6
    eager_launch_s: float = 4.13e-5
    eager_collective_s: float = 2.35e-4
    peer_s: float = 3.7e-4


def links(fitted: Fitted) -> dict[str, Link]:
    """The links between GPUs of one host, by name. NCCL's kernels take some 16 of 132 SMs on all of them."""
    nvlink = Link("NVLink", fitted.nvlink_bytes_per_s, fitted.latency_s, beside=1.6, sm_share=0.13)
    shared_memory = Link("host shared memory", fitted.shared_memory_bytes_per_s, fitted.latency_s, 1.08, 0.13)
    tcp = Link("TCP loopback", 2.5e9, fitted.latency_s, 1.0, 0.13)
    return {link.name: link for link in (nvlink, shared_memory, tcp)}


def stacks(fitted: Fitted) -> dict[str, Stack]:
    """The software that was measured, by name.

    The gated norm alone at the default workload on an H200: ATen's kernels 3.88 ms, Inductor's 1.16, ours 0.77 (in
    Inductor's order of summation) and 0.69 (in ATen's); one traversal of [L,P*B,H] takes 0.123 ms. The block's
    forward and backward by trace: 0.30 and 0.43 ms compiled, one traversal of [B,T,D] 0.020 ms. A chunk more costs
    0.03 ms forward (four and eight chunks in a CUDA graph) and 0.2 backward (two and four by trace). The forward's
    GEMMs on torch 2.6.0: 3.97 ms by cuBLAS, 3.1 in our layer, where some are Triton's; 2.56 on torch 2.11.0. A
    compiled call costs the host 0.1 ms, its functional collectives 0.12 ms each.
    """
    inductor = Passes(9.45, fitted.inductor_backward, 14.5, 21)
    aten = Passes(31.6, fitted.aten_backward, 30, 45)
    reference = Layer(1.0, 1e-5, 1.2e-4, 1e-4, 1, 1, inductor)
    own = replace(reference, passes=replace(inductor, forward=6.3, backward=fitted.own_backward))
    eager_reference = Layer(1.0, fitted.eager_launch_s, fitted.eager_collective_s, 1e-4, 6, 3, aten)
    from_eager = replace(aten, forward=5.6, backward=fitted.own_backward)
    eager_own = replace(own, block_kernels=3, passes=from_eager)
    chunk_s = (3e-5, 2e-4)
    compiled = Stack("torch 2.11.0 compiled", reference, own, chunk_s, PEER_S)
    eager = Stack("torch 2.11.0 eager", eager_reference, eager_own, chunk_s, fitted.peer_s)
    return {stack.name: stack for stack in (compiled, eager, _older(compiled), _older(eager))}


def _older(stack: Stack) -> Stack:
    name = stack.name.replace("2.11.0", "2.6.0")
    reference, own = replace(stack.reference, gemms=0.645), replace(stack.own, gemms=0.83)
    return replace(stack, name=name, reference=reference, own=own)


FITTED = Fitted()
LINKS, STACKS = links(FITTED), stacks(FITTED)
NVLINK, SHARED_MEMORY, TCP = LINKS.values()
COMPILED, EAGER, COMPILED_2_6, EAGER_2_6 = STACKS.values()
_MEMORY_BYTES_PER_S = 350e9  # 40 MiB into a peer's inbox in 0.12 ms, with the barrier
_NVLINK_SHARE = {"H800": 400 / 900}  # of an H200's, by data sheet


def machine(
    gpu: str = H200.name, link: str = NVLINK.name, stack: str = COMPILED.name, *,
    cards: int = 8, gpus_per_host: int = 8, fitted: Fitted = FITTED,
) -> Machine:  # fmt: skip
    """A machine by the names of its GPU (`GPUS`), the link between a host's GPUs (`LINKS`) and its software
    (`STACKS`)."""
    local, memory = links(fitted)[link], None
    if link == NVLINK.name:
        share = _NVLINK_SHARE.get(gpu, 1.0)
        local, memory = replace(local, bytes_per_s=local.bytes_per_s * share), _MEMORY_BYTES_PER_S * share
    return Machine(GPUS[gpu], local, stacks(fitted)[stack], CARD, cards, gpus_per_host, memory)
