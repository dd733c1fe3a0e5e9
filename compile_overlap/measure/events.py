"""What ran on a device during one call: events in four lanes, each computation or communication.

    lane      kind           which
    compute   gemm           cuBLAS's and our GEMMs
              gemm-combine   the GEMM that stores its tiles into the peers' memory (`kernels.gemm_combine`)
              epilogue       bias, gated norm and product, forward and backward
              other          packs, unpacks, sums, the block around the layer
    copy      copy           copies to or from a peer, or on a stream of their own: copy engines
              local-copy     copies within the device on the computation's stream; these are computation
    network   nccl           kernels of NCCL
              store          a kernel that stores rows into the peers' memory and waits for theirs (`kernels.store_rows`)
    signal    signal         tells a peer that its rows have been put
              wait           waits for that; also the copy of the results that begins with a wait for all ranks
                             (`kernels.collect`), as a whole
              barrier        waits for all ranks of the host

Kinds follow from the kernels' names. Waits and barriers move nothing, but nothing else runs on their stream meanwhile:
they count as communication.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Iterable

from .intervals import Span, union

LANES = ("compute", "copy", "network", "signal")
GEMM, COMBINE, EPILOGUE, OTHER, COPY, LOCAL_COPY, NCCL = (
    "gemm", "gemm-combine", "epilogue", "other", "copy", "local-copy", "nccl",
)  # fmt: skip
_LANE_OF = {
    GEMM: "compute", COMBINE: "compute", EPILOGUE: "compute", OTHER: "compute", COPY: "copy", LOCAL_COPY: "copy",
    NCCL: "network", "store": "network", "signal": "signal", "wait": "signal", "barrier": "signal",
}  # fmt: skip
KINDS = tuple(_LANE_OF)
COMPUTATION = frozenset((GEMM, COMBINE, EPILOGUE, OTHER, LOCAL_COPY))
_PATTERNS = (
    ("store", re.compile(r"_store_rows")),
    ("wait", re.compile(r"wait_signal_kernel|^_collect$")),
    ("signal", re.compile(r"put_signal_kernel")),
    ("barrier", re.compile(r"symmetric_memory::barrier_kernel|^barrier_kernel")),
    (NCCL, re.compile(r"nccl", re.IGNORECASE)),
    (COPY, re.compile(r"^Memcpy PtoP")),
    (LOCAL_COPY, re.compile(r"^Memcpy")),
    (COMBINE, re.compile(r"_gemm_combine")),
    (GEMM, re.compile(r"gemm|nvjet|cutlass|xmma|_chunk_bmm", re.IGNORECASE)),
    (EPILOGUE, re.compile(r"layer_norm.*silu|silu.*layer_norm|_gated_norm|_row_sums|_columns$")),
)
_BACKWARD = re.compile(r"backward|_row_sums|_columns")


@dataclass(frozen=True)
class Event:
    """One kernel or copy. Times in microseconds since the call's first; `launched`: when the host had issued it.

    `stream` and `launched` are None where the trace does not have them; `label` is what the schedule or a profiler
    range calls it.
    """

    name: str
    kind: str
    begin: float
    end: float
    stream: int | None = None
    launched: float | None = None
    label: str | None = None

    @property
    def lane(self) -> str:
        return _LANE_OF[self.kind]

    @property
    def duration(self) -> float:
        return self.end - self.begin

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTATION

    @property
    def forward_epilogue(self) -> bool:
        return self.kind == EPILOGUE and _BACKWARD.search(self.name) is None


def kind_of(name: str) -> str:
    """The kind of a kernel or copy of this name; a copy's stream can make another of it (`on_streams`)."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def on_streams(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events with copies told apart: those beside the computation's stream are communication.

    The computation's stream is the one with the most GEMM time, or the only one with anything but copies.
    """
    events = tuple(events)
    busy: Counter = Counter()
    for event in events:
        busy[event.stream] += event.duration * (event.kind in (GEMM, COMBINE)) + 1e-6 * (event.lane == "compute")
    main = busy.most_common(1)[0][0] if busy and busy.most_common(1)[0][1] else None
    return tuple(
        replace(event, kind=COPY) if event.kind == LOCAL_COPY and event.stream != main else event for event in events
    )


def computation(events: Iterable[Event]) -> list[Span]:
    return union((event.begin, event.end) for event in events if event.computes)


def communication(events: Iterable[Event]) -> list[Span]:
    return union((event.begin, event.end) for event in events if not event.computes)
