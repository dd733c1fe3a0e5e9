"""How much communication is hidden: figures of unprofiled times, and of one call's device trace.

Times judge, traces explain: a profiler slows the host down, and one call is one call.

Of times in seconds, with T_serial the sequential reference, T_own the overlapped layer's own kernels in sequence (one
chunk), T_comm the exchanges alone, T_compute and T_own_compute the two without their exchanges:

    hidden_fraction      (T_serial - T_overlap) / T_comm: the assignment's estimate, negative where it is slower. It
                         counts faster kernels as hidden communication
    hidden_fraction_own  (T_own - T_overlap) / T_comm: the same against our own kernels
    e_overlap            (T_comm + T_own_compute - T_overlap) / min(T_comm, T_own_compute): how much of the shorter of
                         the two ran beside the other; 1 where the longer one alone is left, 0 in sequence. Our
                         definition
    e_overlap_flux       1 - (T_overlap - T_best) / (T_serial - T_best), T_best the faster of the two computations:
                         Flux's overlap efficiency (Chang et al., 2024, arXiv:2406.06858). It charges whatever is not
                         the best computation to communication
    exposed_s            T_overlap - T_own_compute

Of a trace, from unions of intervals and never from sums of durations (what counts as which: `events`):

    hidden_fraction      share of the communication's union that lies under the computation's
    exposed_us           communication outside the computation, plus `combine_excess_us`
    combine_excess_us    by how much GEMMs that store into the peers' memory took longer than with local stores; None
                         where that was not measured, and then `exposed_us` is a lower bound
    inflation            communication's union over that of the same exchanges alone
    idle_us              time before the last computation in which none runs
    critical_path_us     see `critical_path`
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

from . import events as kinds
from .critical_path import by_kind, critical_path
from .events import Event, communication, computation
from .intervals import common, length
from .kineto import Call


@dataclass(frozen=True)
class Times:
    """Seconds of one rank, or of the slowest one. None: not measured (no exchanges at P = 1)."""

    serial: float
    overlap: float
    compute: float
    comm: float | None = None
    own: float | None = None
    own_compute: float | None = None

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be a positive number of seconds")


def time_figures(times: Times) -> dict[str, float | None]:
    """The figures of unprofiled times; None where what they need was not measured, or a denominator is not positive."""
    own_compute = times.own_compute or times.compute
    best = min(times.compute, own_compute)
    comm = times.comm
    return {
        "speedup": times.serial / times.overlap,
        "hidden_fraction": (times.serial - times.overlap) / comm if comm else None,
        "hidden_fraction_own": (times.own - times.overlap) / comm if comm and times.own else None,
        "e_overlap": (comm + own_compute - times.overlap) / min(comm, own_compute) if comm else None,
        "e_overlap_flux": 1 - (times.overlap - best) / (times.serial - best) if times.serial > best else None,
        "exposed_s": times.overlap - own_compute,
    }


def trace_figures(
    call: Call, local_combine_us: Mapping[str, float] | None = None, alone_us: float | None = None
) -> dict[str, Any]:
    """The figures of one call on one rank.

    `local_combine_us`: by label, what each GEMM that stores to its peers takes with local stores alone. `alone_us`: the
    union of the communication of the same exchanges without computation beside them.
    """
    events = call.events
    compute, network = computation(events), communication(events)
    total = length(network)
    hidden = min(total, length(common(network, compute)))  # pieces round
    combines = [event for event in events if event.kind == kinds.COMBINE]
    excess = _excess(combines, local_combine_us)
    path = critical_path(events, call.dependencies)
    communicates = set(kinds.KINDS) - kinds.COMPUTATION
    return {
        "span_us": call.span,
        "computation_us": length(compute),
        "communication_us": total,
        "hidden_us": hidden,
        "hidden_fraction": hidden / total if total else 0.0,
        "exposed_us": total - hidden + (excess or 0.0),
        "combine_excess_us": excess,
        "inflation": total / alone_us if alone_us and total else None,
        "idle_us": compute[-1][1] - length(compute) if compute else 0.0,
        "gemm_us": sum(event.duration for event in events if event.kind in (kinds.GEMM, kinds.COMBINE)),
        "other_us": sum(event.duration for event in events if event.kind in (kinds.EPILOGUE, kinds.OTHER)),
        "epilogues": sum(event.forward_epilogue for event in events),
        "kernels": len(events),
        "critical_path_us": by_kind(path),
        "critical_path_communication_us": sum(part.end - part.begin for part in path if part.what in communicates),
        "dependencies": "inferred" if call.dependencies is None else "trace",
    }


def _excess(combines: Sequence[Event], local_us: Mapping[str, float] | None) -> float | None:
    """None where one of them has no counterpart; 0 where there are none."""
    if not combines:
        return 0.0
    if local_us is None or any(event.label not in local_us for event in combines):
        return None
    return sum(max(0.0, event.duration - local_us[event.label]) for event in combines)


def slowest(figures: Sequence[Mapping[str, Any]]) -> int:
    """The rank whose call took longest."""
    return max(range(len(figures)), key=lambda rank: figures[rank]["span_us"])
