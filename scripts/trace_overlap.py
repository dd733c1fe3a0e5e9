#!/usr/bin/env python3
r"""What runs beside what on the GPU: a profile of one or more modes, and how much of the communication is hidden.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/trace_overlap.py \
        --modes kernel,kernel:naive --output traces [the benchmark's flags, --backward among them]

For each mode every rank profiles `--iterations` calls under the benchmark's protocol and keeps the shortest. From its
kernels, in microseconds:

    communication   time in which an NCCL kernel runs (it includes the time it waits for its peers)
    hidden          the part of it in which another kernel runs too
    idle            time before the last kernel in which no kernel but NCCL's runs
    epilogues       how many kernels contain a layer norm and a gate: one for each chunk when none are fused across

Writes MODE.trace.json, with the kernels of rank 0 and the figures of all ranks, and MODE.trace.txt, which lists for
each exchange what ran beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

import torch  # noqa: E402
from rankmixer import record  # noqa: E402
from rankmixer.cli import guarded, make_timer, pass_name, prepare  # noqa: E402
from rankmixer.options import add_common_options, configuration  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

LANES = (("exchange", ("nccl",)), ("gemm", ("gemm", "nvjet", "cutlass", "xmma")))
SPIN = "spin_kernel"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="trace_overlap.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="kernel", help="modes or mode:variant (default: %(default)s)")
    parser.add_argument("--output", default="traces", help="folder (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=6, help="profiled calls (default: %(default)s)")
    add_common_options(parser)
    parser.set_defaults(comp_only=False)
    options = parser.parse_args()
    modes = options.modes.split(",")

    def prepare_run():
        workload = prepare(options, {mode.partition(":")[0] for mode in modes})
        if workload.runtime.device.type != "cuda":
            raise ValueError(f"device={options.device!r}: a trace needs CUDA devices")
        return workload

    return guarded(prepare_run, lambda workload: _run(parser, options, workload, modes))


def _run(parser, options, workload, modes) -> None:
    runtime = workload.runtime
    timer = make_timer(options, runtime)
    for mode in modes:
        call = workload.timed_call(mode)
        timer.measure(call, warmup=options.warmup, num_tests=2, before=workload.clear_gradients)
        kernels = _shortest(workload, timer, call, options.iterations)
        figures = runtime.gather(list(summarize(kernels).items()))
        if not runtime.is_main:
            continue
        name = mode.replace(":", "-") + ("_backward" if options.backward else "")
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "kind": "trace",
            "mode": mode,
            "pass": pass_name(options),
            "configuration": configuration(parser, options),
            "environment": record.environment(runtime.device),
            "ranks": [dict(items) for items in figures],
            "kernels": kernels,
        }
        (folder / f"{name}.trace.json").write_text(json.dumps(content, indent=1) + "\n")
        text = describe(mode, content)
        (folder / f"{name}.trace.txt").write_text(text + "\n")
        print(text, flush=True)
    runtime.barrier()


def _shortest(workload, timer, call, iterations: int) -> list[dict]:
    """The kernels of the shortest of the profiled calls, in order: name, lane, begin and duration in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        timer.measure(call, warmup=0, num_tests=iterations, before=workload.clear_gradients)
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("nccl:")
    ]
    runs: list[list] = []
    for begin, end, name in sorted(events):
        if SPIN in name:  # the timer spins on the GPU before each call
            runs.append([])
        elif runs and not _between_calls(name):
            runs[-1].append((begin, end, name))
    runs = [run for run in runs[1:] if run]
    best = min(runs, key=lambda run: max(end for _, end, _ in run) - run[0][0])
    origin = best[0][0]
    return [
        {"name": name[:160], "lane": _lane(name), "begin_us": begin - origin, "duration_us": end - begin}
        for begin, end, name in best
    ]


def _between_calls(name: str) -> bool:
    """Kernels of the protocol itself: the flush of the cache and the barrier."""
    return "FillFunctor" in name or "AllReduce" in name or name.startswith("Memset")


def _lane(name: str) -> str:
    lowered = name.lower()
    return next((lane for lane, marks in LANES if any(mark in lowered for mark in marks)), "other")


def summarize(kernels: list[dict]) -> dict[str, float]:
    """The figures of one call on one rank; times in microseconds."""
    spans = [(k["begin_us"], k["begin_us"] + k["duration_us"]) for k in kernels if k["lane"] != "exchange"]
    busy = _union(spans)
    exchanges = [(k["begin_us"], k["begin_us"] + k["duration_us"]) for k in kernels if k["lane"] == "exchange"]
    communication = sum(end - begin for begin, end in exchanges)
    hidden = sum(
        max(0.0, min(end, busy_end) - max(begin, busy_begin))
        for begin, end in exchanges
        for busy_begin, busy_end in busy
    )
    last = max(end for _, end in busy)
    normed = [k["name"] for k in kernels if "layer_norm" in k["name"]]
    epilogues = [name for name in normed if "silu" in name and "backward" not in name]
    return {
        "span_us": max(end for _, end in (*spans, *exchanges)),
        "communication_us": communication,
        "hidden_us": hidden,
        "hidden_fraction": hidden / communication if communication else 0.0,
        "idle_us": last - sum(end - begin for begin, end in busy),
        "gemm_us": sum(k["duration_us"] for k in kernels if k["lane"] == "gemm"),
        "other_us": sum(k["duration_us"] for k in kernels if k["lane"] == "other"),
        "epilogues": len(epilogues),
        "kernels": len(kernels),
    }


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def describe(mode: str, content: dict) -> str:
    """The figures of all ranks, and for each of rank 0's exchanges what ran beside it."""
    lines = [f"{mode}, {content['pass']}"]
    for rank, figures in enumerate(content["ranks"]):
        lines.append(
            f"rank {rank}: span {figures['span_us']:.0f} us, communication {figures['communication_us']:.0f} us, "
            f"{figures['hidden_fraction']:.1%} hidden, compute idle {figures['idle_us']:.0f} us, "
            f"GEMMs {figures['gemm_us']:.0f} us, other kernels {figures['other_us']:.0f} us, "
            f"{figures['epilogues']} forward epilogues"
        )
    for exchange in (k for k in content["kernels"] if k["lane"] == "exchange"):
        begin, end = exchange["begin_us"], exchange["begin_us"] + exchange["duration_us"]
        beside = []
        for other in content["kernels"]:
            shared = min(end, other["begin_us"] + other["duration_us"]) - max(begin, other["begin_us"])
            if other["lane"] != "exchange" and shared > 1:
                beside.append(f"{other['name'][:44]} {shared:.0f}")
        lines.append(f"  exchange {begin:.0f}..{end:.0f} beside: {'; '.join(beside) or 'nothing'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
