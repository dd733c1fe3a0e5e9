#!/usr/bin/env python3
r"""What runs beside what on the GPU: a profile of one or more modes, and how much of the communication is hidden.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/trace_overlap.py \
        --modes kernel,kernel:naive --output traces [the benchmark's flags, --backward among them]

For each mode every rank profiles `--iterations` calls under the benchmark's protocol; the first is dropped, and all
ranks keep the one whose slowest rank was fastest. What the figures are: `compile_overlap/measure/figures.py`. Writes

    MODE.trace.json      the events of rank 0 and the figures of all ranks
    MODE.trace.txt       the figures, and for each of rank 0's exchanges what ran beside it
    MODE.perfetto.json   all ranks, for ui.perfetto.dev: a track for each lane, what is exposed, the critical path
    MODE.svg             the slowest rank, drawn; with `--png` as PNG too (needs matplotlib)
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

import torch  # noqa: E402
from rankmixer import plugins, record, variants  # noqa: E402
from rankmixer.cli import guarded, make_timer, pass_name, prepare  # noqa: E402
from rankmixer.options import add_common_options, configuration  # noqa: E402
from rankmixer.runtime import choose_device, leave  # noqa: E402

from compile_overlap import api  # noqa: E402
from compile_overlap.config import Settings  # noqa: E402
from compile_overlap.layout import check_call  # noqa: E402
from compile_overlap.measure import Call, calls_of, profiled, slowest, trace_figures  # noqa: E402
from compile_overlap.measure.combine import local_combine_us  # noqa: E402
from compile_overlap.measure.naming import named, schedules_of  # noqa: E402
from compile_overlap.measure.perfetto import chrome_trace  # noqa: E402
from compile_overlap.measure.picture import draw  # noqa: E402
from compile_overlap.measure.records import call_to_record  # noqa: E402
from compile_overlap.schedule import Plan  # noqa: E402


def add_trace_options(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--output", default=output, help="folder (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=6, help="profiled calls, at least 2 (default: %(default)s)")
    parser.add_argument("--png", action="store_true", help="write pictures as PNG too; needs matplotlib")


def check_trace_options(options: argparse.Namespace) -> None:
    """Raises ValueError for what the trace options do not allow, ImportError for PNG without matplotlib."""
    if options.iterations < 2:
        raise ValueError(f"iterations={options.iterations}: must be at least 2, the first is dropped")
    if options.png:
        import matplotlib  # noqa: F401


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="trace_overlap.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="kernel", help="modes or mode:variant (default: %(default)s)")
    add_trace_options(parser, "traces")
    add_common_options(parser)
    parser.set_defaults(comp_only=False)
    options = parser.parse_args(arguments)
    modes = options.modes.split(",")

    def prepare_run():
        check_trace_options(options)
        if choose_device(options.device).type != "cuda":
            raise ValueError(f"device={options.device!r}: a trace needs CUDA devices")
        return prepare(options, {variants.parse(mode).mode for mode in modes})

    return guarded(prepare_run, lambda workload: _run(parser, options, workload, modes))


def _run(parser, options, workload, modes) -> None:
    for mode in modes:
        make_timer(options, workload.runtime).measure(
            workload.timed_call(mode), warmup=options.warmup, num_tests=2, before=workload.clear_gradients
        )
        calls, figures = trace_mode(workload, mode)
        if workload.runtime.is_main:
            text, _ = write_trace(parser, options, workload, mode, calls, figures)
            print(text, flush=True)
    workload.runtime.barrier()


def trace_mode(
    workload: Any, mode: str, alone_us: list[float] | None = None
) -> tuple[list[Call], list[dict[str, Any]]]:
    """The traced call of each rank, its events named, and its figures, on every rank.

    `alone_us`: for each rank the communication of the exchanges alone; it is compared with that of modes which exchange
    by NCCL only.
    """
    runtime, options = workload.runtime, workload.options
    plan, local_us = followed_plan(workload, mode), None
    if plan is not None and plan.peers:
        layout = check_call(workload.block.ffn, workload.inputs)
        local_us = local_combine_us(layout, plan, workload.dtype, runtime.device, options.backward)
    name = functools.partial(named, schedules=schedules_of(plan, options.backward) if plan else ())
    with variants.parse(mode).applied():
        calls = traced(workload, workload.timed_call(mode), name)
    by_nccl = all(event.kind in ("nccl",) for call in calls for event in call.events if not event.computes)
    alone = alone_us if alone_us is not None and by_nccl else [None] * len(calls)
    return calls, [trace_figures(call, local_us, each) for call, each in zip(calls, alone, strict=True)]


def followed_plan(workload: Any, mode: str) -> Plan | None:
    """The plan whose schedule a mode follows; None for other modes, plugins, and variants whose order is not ours."""
    variant = variants.parse(mode)
    if variant.mode != "kernel" or plugins.load_plugin() is not api.forward_ffn:
        return None
    with variant.applied(), torch.set_grad_enabled(workload.options.backward):
        layout = check_call(workload.block.ffn, workload.inputs)
        plan = api.plan_for(workload.block.ffn, layout, Settings.from_environment())
    return None if {"reorder", "pin-order"} & set(plan.disabled) else plan


def traced(workload: Any, call: Callable[[], Any], name: Callable = tuple) -> list[Call]:
    """Of each rank, the profiled call whose slowest rank was fastest. All ranks call it together.

    Raises ValueError on all of them where one has no trace of all the calls.
    """
    runtime, options, problem, calls = workload.runtime, workload.options, "", []
    timer = make_timer(options, runtime)
    trace = profiled(
        lambda: timer.measure(call, warmup=0, num_tests=options.iterations, before=workload.clear_gradients)
    )  # fmt: skip
    try:
        calls = calls_of(trace)[1:]
        if len(calls) != options.iterations - 1:
            problem = f"{len(calls) + 1} calls found, {options.iterations} were made"
    except ValueError as error:
        problem = str(error)
    problems, spans = zip(*runtime.gather((problem, [call.span for call in calls])))
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        raise ValueError(f"no trace on rank(s) {sorted(failed)}: {next(iter(failed.values()))}")
    best = min(range(len(calls)), key=lambda index: max(rank[index] for rank in spans))
    chosen = calls[best]
    return runtime.gather(Call(name(chosen.events), chosen.origin, chosen.dependencies))


def write_trace(parser, options, workload, mode, calls, figures) -> tuple[str, dict[str, str]]:
    """Write one mode's files; returns the text, and the files' names by what they are."""
    name = mode.replace(":", "-").replace("/", "-") + ("_backward" if options.backward else "")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": "trace",
        "mode": mode,
        "pass": pass_name(options),
        "configuration": configuration(parser, options),
        "environment": record.environment(workload.runtime.device),
        "ranks": figures,
        **call_to_record(calls[0]),
    }
    text, worst = describe(content, calls[0]), slowest(figures)
    title = f"{mode}, {content['pass']}, rank {worst} of {len(calls)}"
    scene = draw(
        [(mode, calls[worst], figures[worst])],
        f"{title}: {content['environment']['device']}, torch {torch.__version__}",
    )
    facts = {key: content[key] for key in ("mode", "pass", "environment")}
    files = {
        "trace": (f"{name}.trace.json", json.dumps(content, indent=1) + "\n"),
        "text": (f"{name}.trace.txt", text + "\n"),
        "perfetto": (f"{name}.perfetto.json", json.dumps(chrome_trace(calls, facts)) + "\n"),
        "picture": (f"{name}.svg", scene.svg()),
    }
    for file, written in files.values():
        (folder / file).write_text(written)
    if options.png:
        scene.png(folder / f"{name}.png")
    return text, {what: file for what, (file, _) in files.items()}


def describe(content: dict[str, Any], call: Call) -> str:
    """The figures of all ranks, and for each of rank 0's exchanges what ran beside it."""
    lines = [f"{content['mode']}, {content['pass']}"]
    for rank, figures in enumerate(content["ranks"]):
        path = ", ".join(f"{what} {time:.0f}" for what, time in figures["critical_path_us"].items())
        lines.append(
            f"rank {rank}: span {figures['span_us']:.0f} us, communication {figures['communication_us']:.0f} us, "
            f"{figures['hidden_fraction']:.1%} hidden, {figures['exposed_us']:.0f} us exposed, "
            f"compute idle {figures['idle_us']:.0f} us, GEMMs {figures['gemm_us']:.0f} us, "
            f"other kernels {figures['other_us']:.0f} us, {figures['epilogues']} forward epilogues; "
            f"critical path (dependencies {figures['dependencies']}): {path} us"
        )
    for event in (event for event in call.events if not event.computes):
        beside = []
        for other in call.events:
            shared = min(event.end, other.end) - max(event.begin, other.begin)
            if other.computes and shared > 1:
                beside.append(f"{other.name[:44]} {shared:.0f}")
        named_as = f"{event.kind} {event.label or ''}".strip()
        lines.append(f"  {named_as} {event.begin:.0f}..{event.end:.0f} beside: {'; '.join(beside) or 'nothing'}")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main())
