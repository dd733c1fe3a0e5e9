#!/usr/bin/env python3
r"""How good the plans are: all candidates of each shape are timed, the planner's and the tuned choice judged by them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/judge_planner.py \
        --shapes reports/shapes/held_out_32.json --output planner.json [--backward] [--no-compile] [benchmark's flags]

For each shape: `planner` is the plan that the layer takes untuned, `tuned` what `compile_overlap.tune` chooses by
measurements of its own, `four` four even chunks through collectives (fewer where L is small), `unchunked` one chunk,
and the best is the fastest of all candidates, through the peers' memory among them where the settings leave it and the
group can (`A2A_FFN_TRANSPORT=collectives` leaves them out). Candidates are timed in turns on the FFN alone, the slowest
rank of each round. Reported is each choice's median over the best one's, and the geometric mean of these ratios over the
shapes.

The record is written after every shape; run again, it goes on with the shapes that it does not hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]
os.environ["A2A_FFN_PLANS"] = "off"  # a plan that was tuned before is not the planner's choice

import torch  # noqa: E402
from rankmixer import record  # noqa: E402
from rankmixer.schema import geometric_mean  # noqa: E402
from rankmixer.cli import guarded, pass_name  # noqa: E402
from rankmixer.options import add_common_options, configuration, validate  # noqa: E402
from rankmixer.runtime import choose_device, environment_rank, leave, start_runtime  # noqa: E402
from rankmixer.workload import Workload  # noqa: E402
from sweep import SHAPE, agreed, read_shapes  # noqa: E402

import compile_overlap  # noqa: E402
from compile_overlap import api, plan, plan_json, transport  # noqa: E402
from compile_overlap.config import Settings  # noqa: E402
from compile_overlap.layout import check_call  # noqa: E402
from compile_overlap.tune import candidate_of, measure  # noqa: E402

_NOT_OF_A_SHAPE = ("shapes", "output", "json", "help")
_NO_MATTER = ("python", "numpy")  # of the environment, for what the layer takes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="judge_planner.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", required=True, help="JSON file: a list of [B, T, D, k]")
    parser.add_argument("--output", required=True, help="the record, a JSON file")
    parser.add_argument("--most", type=int, default=4, help="plans that the tuning times (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each plan (default: %(default)s)")
    add_common_options(parser)
    return parser


def main(arguments=None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    return guarded(lambda: _prepared(parser, options), lambda prepared: _run(parser, options, *prepared))


def _prepared(parser, options):
    """(runtime, shapes, the first rank's earlier rows). Raises ValueError on every rank."""
    device, P = choose_device(options.device), environment_rank()[1]
    if P == 1:
        raise ValueError("nproc-per-node=1: must be at least 2, one rank has nothing to overlap")
    if min(options.most, options.rounds) < 1:
        raise ValueError(f"most={options.most}, rounds={options.rounds}: must be at least 1")
    shapes = read_shapes(options.shapes, P)
    for options.batch_size, options.tokens, options.dim, options.k in shapes:
        validate(options, P, device)
    runtime = start_runtime(device)
    return runtime, shapes, agreed(runtime, lambda: _earlier(parser, options, P, device))


def _settings() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("A2A_FFN_", "NCCL_"))}


def _earlier(parser, options, P: int, device: torch.device):
    """The rows in the output file. Raises ValueError where it is of another configuration, code or machine."""
    path = Path(options.output)
    if not path.exists():
        return []
    earlier = record.read(path)
    if earlier["kind"] != "planner":
        raise ValueError(f"output={options.output!r}: is a record of kind {earlier['kind']!r}, must be 'planner'")
    asked, known = configuration(parser, options), earlier["configuration"]
    asked = {name: each["value"] for name, each in asked.items() if name not in (*SHAPE, *_NOT_OF_A_SHAPE)}
    known = {name: known.get(name, {}).get("value") for name in asked}
    here = {name: value for name, value in record.environment(device).items() if name not in _NO_MATTER}
    asked |= here | {"world_size": P, "settings": _settings()}
    known |= {name: earlier["environment"].get(name) for name in here}
    known |= {"world_size": earlier["world_size"], "settings": earlier["settings"]}
    other = [f"{name}={known[name]!r}" for name in asked if known[name] != asked[name]]
    if other:
        raise ValueError(f"output={options.output!r}: is of another configuration ({', '.join(other)})")
    return earlier["shapes"]


def _run(parser, options, runtime, shapes, rows) -> None:
    done = [row["shape"] for row in rows]
    for shape in shapes:
        if shape in done:
            continue
        rows.append(_judged(options, runtime, shape))
        runtime.print(describe(rows[-1]))
        if runtime.is_main:
            record.write(_record(parser, options, runtime, rows), options.output)
    runtime.print(summary(rows))
    runtime.barrier()


def _judged(options, runtime, shape) -> dict:
    """One shape's candidates and choices; all ranks call it."""
    compile_overlap.reset()  # a tuned plan is known from then on
    for name, value in zip(SHAPE, shape):
        setattr(options, name, value)
    workload = Workload(options, runtime)
    ffn, settings = workload.block.ffn, Settings.from_environment()
    inputs = workload.inputs.detach().requires_grad_(options.backward)
    with torch.set_grad_enabled(options.backward):
        compiled, layout = not options.no_compile, check_call(ffn, inputs)
        problem = api.problem_of(ffn, layout, settings, candidate_of(ffn, inputs, layout, settings, compiled))
        planner = transport.plan_for(ffn.ep_group, ffn.ep_index, inputs.device, problem)
        tuned = compile_overlap.tune(ffn, inputs, compiled=compiled, most=options.most, rounds=options.rounds)
        plans = transport.candidates(ffn.ep_group, ffn.ep_index, inputs.device, problem)
        samples = measure(ffn, inputs, problem, tuple(dict.fromkeys((*plans, planner, tuned.plan))), options.rounds)
    row = judged(shape, samples, planner, tuned.plan, four(samples, layout, inputs.device.type, settings))
    torch.compiler.reset()
    del workload, ffn, inputs
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def four(plans, layout, device: str, settings: Settings):
    """Among these plans four even chunks through collectives, or as many as L allows; None where there are none."""
    quantum = plan.border_quantum(device, layout.rows, layout.H)
    sizes = plan.chunk_sizes(layout.L, layout.P, replace(settings, chunks=4), quantum)
    return next((each for each in plans if each.sizes == sizes and not each.peers), None)


def judged(shape, samples, planner, tuned, four_chunks) -> dict:
    """The record's row of one shape; `samples`: {plan: the slowest rank's seconds in each round}, unchunked first."""
    median = {each: statistics.median(seconds) for each, seconds in samples.items()}
    best = min(median, key=median.get)
    named = {"planner": planner, "tuned": tuned, "four": four_chunks, "unchunked": next(iter(samples)), "best": best}
    choices = {name: each for name, each in named.items() if each in median}
    return {
        "shape": list(shape),
        "plans": {str(each): plan_json.as_json(each) for each in samples},
        "samples_s": {str(each): seconds for each, seconds in samples.items()},
        "choices": {name: str(each) for name, each in choices.items()},
        "over_best": {name: median[each] / median[best] for name, each in choices.items()},
    }


def means(rows) -> dict[str, float]:
    """The geometric mean of each choice's ratios to the best plan, over the shapes that have it."""
    return {name: geometric_mean(each) for name, each in ratios(rows).items()}


def ratios(rows) -> dict[str, list[float]]:
    """Each choice's ratios to the best plan, of the shapes that have it."""
    names = dict.fromkeys(name for row in rows for name in row["over_best"])
    return {name: [row["over_best"][name] for row in rows if name in row["over_best"]] for name in names}


def _record(parser, options, runtime, rows) -> dict:
    return {
        "schema": record.SCHEMA_VERSION, "kind": "planner", "configuration": configuration(parser, options),
        "environment": record.environment(runtime.device), "world_size": runtime.world_size, "pass": pass_name(options),
        "settings": _settings(), "shapes": rows, "geometric_means": means(rows),
    }  # fmt: skip


def describe(row) -> str:
    """One shape as a line for each plan, the fastest first."""
    median = {text: statistics.median(samples) for text, samples in row["samples_s"].items()}
    lines = [f"\n{tuple(row['shape'])}"]
    for text, seconds in sorted(median.items(), key=lambda item: item[1]):
        names = ", ".join(name for name, chosen in row["choices"].items() if chosen == text)
        lines.append(f"  {seconds * 1e3:>10.4f} ms  {text}{'  <- ' + names if names else ''}")
    return "\n".join(lines)


def summary(rows) -> str:
    """The choices' ratios to the best plan: geometric mean, worst, and shapes within 3 %."""
    lines = [f"\nslower than the best plan by, over {len(rows)} shapes"]
    for name, each in ratios(rows).items():
        mean, within = geometric_mean(each), sum(ratio <= 1.03 for ratio in each)
        lines.append(f"  {name:<10} geometric mean {mean - 1:.1%}, worst {max(each) - 1:.1%}, {within} within 3 %")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main())
