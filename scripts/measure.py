#!/usr/bin/env python3
r"""How much communication an overlapped layer hides: times, figures and device traces of one run in one record.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/measure.py --output measured \
        [--modes none,kernel:sequential,kernel,kernel:peers] [--backward] [--comm-scale 2] [--compute-scale 2] ...

`--modes` has to name none, kernel:sequential and kernel, which the figures need.

On top of `research_topic_2/compare.py`, with its protocol and flags: in interleaved rounds it measures the sequential
reference `none`, our own kernels in sequence (`kernel:sequential`), the overlapped modes, both computations without
exchanges, and the exchanges alone; it then profiles the overlapped modes and the exchanges. What the figures are:
`compile_overlap/measure/figures.py`.

Writes OUTPUT/measurement[_backward].json (or --json FILE), a record of kind `overlap-measurement` with all raw
samples, and for each overlapped mode the files of `trace_overlap.py`. Without CUDA there are no device traces: the
record says so and holds the figures of the times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import trace_overlap

import compare  # research_topic_2's, which trace_overlap has put on the path
from rankmixer import record, variants
from rankmixer.cli import guarded, prepare
from rankmixer.runtime import leave

from compile_overlap.measure import Times, slowest, time_figures
from compile_overlap.measure.events import communication
from compile_overlap.measure.intervals import length

SEQUENTIAL = "kernel:sequential"
LEGEND = (
    "hidden = (T_none - T) / T_comm; own: the same against kernel:sequential; E = (T_comm + T_compute - T) / the less",
    "E Flux = 1 - (T - T_best) / (T_none - T_best); exposed = T - T_compute",
    "T_compute: kernel without its exchanges; T_best: none or kernel without theirs, the faster",
)
NO_TRACE = "no device trace: this run is on CPU, where kernels and exchanges share cores and have no lanes"


def main(arguments: list[str] | None = None) -> int:
    parser = compare.build_parser()
    parser.prog, parser.description = "measure.py", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    trace_overlap.add_trace_options(parser, "measured")
    parser.set_defaults(modes=f"none,{SEQUENTIAL},kernel", own_comp_only=True)
    options = parser.parse_args(arguments)

    def prepare_run():
        trace_overlap.check_trace_options(options)
        modes = compare.check_modes(options)
        missing = {"none", "kernel", SEQUENTIAL} - set(modes)
        if missing:
            raise ValueError(f"modes={options.modes!r}: must hold {', '.join(sorted(missing))} too")
        return prepare(options, {variants.parse(name).mode for name in modes})

    return guarded(prepare_run, lambda workload: _run(parser, options, workload))


def _run(parser, options, workload) -> None:
    runtime = workload.runtime
    result = compare.compare(parser, options, workload)
    overlapped = [mode for mode in result["summary"] if mode not in ("none", SEQUENTIAL)]
    hiding = {mode: _hiding(result["measurements"], mode) for mode in overlapped}
    traces, note = _traces(parser, options, workload, overlapped)
    result |= {"kind": "overlap-measurement", "hiding": hiding, "traces": traces, "trace_note": note}
    runtime.print(compare.table(result))
    runtime.print(table(result))
    if runtime.is_main:
        name = f"measurement{'_backward' if options.backward else ''}.json"
        record.write(result, options.json or Path(options.output) / name)
    runtime.barrier()
    wrong = [mode for mode, outcome in result["checks"].items() if "problem" in outcome]
    if wrong:
        raise AssertionError(f"check failed: {', '.join(wrong)}")


def _hiding(measurements: dict[str, Any], mode: str) -> dict[str, Any]:
    """The figures of a mode's times: of the slowest rank in each iteration, and of each rank by itself."""
    ranks = len(measurements[mode]["samples_s"])

    def median(name: str, rank: int | None) -> float | None:
        if name not in measurements:
            return None
        if rank is None:
            return measurements[name]["slowest_rank"]["p50_s"]
        return record.percentile(sorted(measurements[name]["samples_s"][rank]), 50)

    def figures(rank: int | None) -> dict[str, Any]:
        names = {
            "serial": "none", "overlap": mode, "compute": "comp-only:none", "comm": compare.EXCHANGES,
            "own": SEQUENTIAL, "own_compute": "comp-only:kernel",
        }  # fmt: skip
        times = {time: median(name, rank) for time, name in names.items()}
        return {"times_s": times, **time_figures(Times(**times))}

    return {"slowest_rank": figures(None), "ranks": [figures(rank) for rank in range(ranks)]}


def _traces(parser, options, workload, modes: list[str]) -> tuple[dict[str, Any], str | None]:
    """For each mode every rank's figures, the slowest rank and the files; or None for each, and why."""
    runtime = workload.runtime
    if runtime.device.type != "cuda":
        return dict.fromkeys(modes), NO_TRACE
    alone = None
    if runtime.world_size > 1:
        exchanges = trace_overlap.traced(workload, compare.exchange_call(workload))
        alone = [length(communication(call.events)) for call in exchanges]
    traces = {}
    for mode in modes:
        calls, figures = trace_overlap.trace_mode(workload, mode, alone)
        files = {}
        if runtime.is_main:
            _, files = trace_overlap.write_trace(parser, options, workload, mode, calls, figures)
        traces[mode] = {"ranks": figures, "slowest_rank": slowest(figures), "alone_us": alone, "files": files}
    return traces, None


def table(result: dict[str, Any]) -> str:
    """The figures as text: of the slowest rank's times, and of the slowest rank's trace; none where these mean nothing."""
    if result["trace_note"] == NO_TRACE:
        return f"note: {NO_TRACE}; neither do hidden and exposed times mean anything there"
    width = max(18, *(len(mode) + 2 for mode in result["hiding"]))
    lines = [f"\n{'mode':<{width}}{'hidden':>9}{'own':>9}{'E':>9}{'E Flux':>9}{'exposed us':>12}"]
    for mode, values in result["hiding"].items():
        figures = values["slowest_rank"]
        shares = ("hidden_fraction", "hidden_fraction_own", "e_overlap", "e_overlap_flux")
        cells = "".join(f"{_percent(figures[share]):>9}" for share in shares)
        lines.append(f"{mode:<{width}}{cells}{figures['exposed_s'] * 1e6:>12.1f}")
    lines += LEGEND
    for mode, trace in result["traces"].items():
        if trace:
            rank = trace["slowest_rank"]
            figures = trace["ranks"][rank]
            communication_us, inflation = figures["communication_us"], figures["inflation"]
            on_path_us = figures["critical_path_communication_us"]
            lines.append(
                f"trace of {mode}, rank {rank}: {figures['hidden_fraction']:.1%} of {communication_us:.0f} us "
                f"of communication hidden, {figures['exposed_us']:.0f} us exposed, "
                f"inflation {'-' if inflation is None else format(inflation, '.2f')}, "
                f"{on_path_us:.0f} us of it on the critical path of {figures['span_us']:.0f} us"
            )
    return "\n".join([*lines, *([f"note: {result['trace_note']}"] if result["trace_note"] else [])])


def _percent(share: float | None) -> str:
    return "-" if share is None else format(share, ".1%")


if __name__ == "__main__":
    leave(main())
