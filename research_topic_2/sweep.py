"""Compares the modes of compare.py over a list of shapes, one record a shape; ended early, it goes on where it stopped.

    torchrun --standalone --nproc-per-node 2 research_topic_2/sweep.py --shapes reports/shapes/held_out_32.json \\
        --modes none,kernel --output DIR [--no-compile] [flags of compare.py]

Every shape's modes are measured interleaved, in one process. The list is drawn and committed before it is run:

    python research_topic_2/sweep.py --draw 32 --seed 7 --shapes reports/shapes/held_out_32.json

draws from the range of the assignment: 1 <= B <= 512 (evenly by its logarithm), 16 <= T <= 64 (multiples of 8, so that
2, 4 and 8 ranks divide them), 128 <= D <= 1280 with T dividing D, k in {2, 3, 6}.

At the end ``summary.json`` and a table hold each mode's ratio to none per shape, with a 95 % confidence interval of the
ratio of medians (2,000 bootstrap samples of the iterations' slowest ranks), and the geometric mean over the shapes.
"""

import argparse
import gc
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch

from compare import build_parser as comparison_parser
from compare import check_modes, compare
from rankmixer import plugins, record
from rankmixer.cli import pass_name
from rankmixer.options import configuration, validate
from rankmixer.runtime import choose_device, environment_rank, start_runtime, stop_runtime
from rankmixer.workload import Workload

BOOTSTRAP_SAMPLES = 2000
MOST_SHAPES = 1000
SHAPE = ("batch_size", "tokens", "dim", "k")
_OF_THE_SWEEP = ("shapes", "output", "draw", "json", "help")


def build_parser():
    """The comparison's flags, with a list of shapes instead of one."""
    parser = comparison_parser()
    parser.prog, parser.description = "sweep.py", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", required=True, help="JSON file: a list of [B, T, D, k]")
    parser.add_argument("--output", help="folder of the records, one a shape, and of summary.json")
    parser.add_argument("--draw", type=int, metavar="N", help="write N shapes to --shapes, drawn with --seed, and exit")
    parser.set_defaults(warmup=5, num_tests=30)
    return parser


def draw_shapes(count, seed):
    """``count`` distinct shapes [B, T, D, k] of the assignment's range; the same for the same seed."""
    if not 1 <= count <= MOST_SHAPES:
        raise ValueError(f"draw={count}: must be from 1 to {MOST_SHAPES}")
    source, shapes = random.Random(seed), {}
    while len(shapes) < count:
        tokens = source.choice(range(16, 65, 8))
        widths = range(-(-128 // tokens) * tokens, 1281, tokens)
        batch = round(math.exp(source.uniform(0, math.log(512))))
        shapes[batch, tokens, source.choice(widths), source.choice((2, 3, 6))] = None
    return [list(shape) for shape in shapes]


def ratio_interval(baseline, candidate, seed=0):
    """median(baseline) / median(candidate) and its 95 % bootstrap interval, of two lists of seconds."""
    generator = np.random.default_rng(seed)

    def medians(samples):
        return np.median(generator.choice(np.asarray(samples), (BOOTSTRAP_SAMPLES, len(samples))), axis=1)

    low, high = np.percentile(medians(baseline) / medians(candidate), (2.5, 97.5))
    return float(np.median(baseline) / np.median(candidate)), float(low), float(high)


def summarize(records):
    """{mode: {"shapes": [{"shape", "ratio", "low", "high", "equal"}], "geometric_mean", "worst"}} over shapes' records."""
    modes = dict.fromkeys(name for each in records for name in each["summary"] if name != "none")
    result = {}
    for mode in modes:
        rows = []
        for each in (each for each in records if mode in each["summary"]):
            slowest = {name: [max(column) for column in zip(*each["measurements"][name]["samples_s"])]
                       for name in ("none", mode)}
            ratio, low, high = ratio_interval(slowest["none"], slowest[mode])
            shape = [each["configuration"][name]["value"] for name in SHAPE]
            equal = each["full_batch"].get(mode, {}).get("equal")
            rows.append({"shape": shape, "ratio": ratio, "low": low, "high": high, "equal": equal})
        logarithms = [math.log(row["ratio"]) for row in rows]
        result[mode] = {"shapes": rows, "geometric_mean": math.exp(sum(logarithms) / len(rows)),
                        "worst": min(row["ratio"] for row in rows)}
    return result


def table(summary):
    """The summary as text."""
    lines = []
    for mode, values in summary.items():
        lines.append(f"\n{mode}: T_none / T_mode, 95 % interval, output of the full batch")
        for row in sorted(values["shapes"], key=lambda row: row["ratio"]):
            verdict = {True: "equal", False: "differs", None: "not compared"}[row["equal"]]
            lines.append(f"  {str(tuple(row['shape'])):<22}{row['ratio']:>7.3f}  [{row['low']:.3f}, {row['high']:.3f}]  {verdict}")
        lines.append(f"  geometric mean {values['geometric_mean']:.3f}, worst {values['worst']:.3f}, "
                     f"{len(values['shapes'])} shapes")
    return "\n".join(lines)


def read_shapes(path, world_size):
    """The shapes of a file. Raises ValueError where they are none, or ``world_size`` ranks cannot share their tokens."""
    try:
        shapes = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"shapes={str(path)!r}: is no JSON ({error})") from None
    fits = isinstance(shapes, list) and shapes and all(
        isinstance(shape, list) and len(shape) == 4 and all(type(n) is int and n > 0 for n in shape) for shape in shapes)
    if not fits or any(tokens % world_size or dim % tokens for _, tokens, dim, _ in shapes):
        raise ValueError(f"shapes={str(path)!r}: must be a list of [B, T, D, k] with T a multiple of {world_size} and D of T")
    return shapes


def main(arguments=None):
    """Draw shapes, or run the sweep; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        if options.draw is not None:
            shapes = draw_shapes(options.draw, options.seed)
            Path(options.shapes).parent.mkdir(parents=True, exist_ok=True)
            Path(options.shapes).write_text(json.dumps(shapes) + "\n")
            return 0
        device, world_size = choose_device(options.device), environment_rank()[1]
        shapes, modes = read_shapes(options.shapes, world_size), check_modes(options)
        if options.output is None:
            raise ValueError("output=None: must be a folder for the records")
        Path(options.output).mkdir(parents=True, exist_ok=True)
        known = {shape: _earlier(parser, options, shape) for shape in map(tuple, shapes)}
        if any(name.startswith("kernel") for name in modes):
            plugins.load_plugin()
        for options.batch_size, options.tokens, options.dim, options.k in shapes:
            validate(options, world_size, device)
    except (ValueError, ImportError, OSError) as error:
        print(f"error (rank {environment_rank()[0]}): {error}", file=sys.stderr, flush=True)
        return 2
    runtime = start_runtime(device)
    try:
        records = [_measured(parser, options, runtime, shape, known[tuple(shape)]) for shape in shapes]
    except AssertionError as error:  # raised on every rank
        print(f"AssertionError (rank {runtime.rank}): {error}", file=sys.stderr, flush=True)
        stop_runtime()
        return 1
    if runtime.is_main:
        summary = summarize(records)
        print(table(summary), flush=True)
        record.write({
            "schema": record.SCHEMA_VERSION, "kind": "sweep", "environment": records[-1]["environment"],
            "world_size": world_size, "pass": pass_name(options), "compiled": not options.no_compile,
            "shapes": options.shapes, "modes": summary}, Path(options.output) / "summary.json")
    runtime.barrier()
    stop_runtime()
    return 0


def _path(options, shape):
    return Path(options.output) / f"{'x'.join(map(str, shape))}.json"


def _earlier(parser, options, shape):
    """The record of a shape in the output folder, or None. Raises ValueError where it is of another configuration."""
    path = _path(options, shape)
    if not path.exists():
        return None
    earlier = record.read(path)
    asked = configuration(parser, options)
    known = earlier["configuration"]
    other = [f"{name}={known.get(name, {}).get('value')!r}" for name in asked
             if name not in (*SHAPE, *_OF_THE_SWEEP) and known.get(name, {}).get("value") != asked[name]["value"]]
    if other:
        raise ValueError(f"output={options.output!r}: {path.name} is of another configuration ({', '.join(other)})")
    return earlier


def _measured(parser, options, runtime, shape, earlier):
    """The record of one shape: the main rank's earlier one, or measured now."""
    if runtime.gather(earlier is not None)[0]:
        return earlier
    for name, value in zip(SHAPE, shape):
        setattr(options, name, value)
    workload = Workload(options, runtime)
    result = compare(parser, options, workload)
    if runtime.is_main:
        record.write(result, _path(options, shape))
    del workload
    gc.collect()
    torch.compiler.reset()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    sys.exit(main())
