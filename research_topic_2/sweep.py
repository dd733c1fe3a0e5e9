"""Compares modes over lists of shapes, into one results file; ended early, it goes on where it stopped.

    torchrun --standalone --nproc-per-node 2 research_topic_2/sweep.py --output sweep.jsonl [flags of compare.py]

Every shape's modes are measured interleaved, in one process; its record is one line of the file (results_file.py).
With another ``--backward`` or ``--no-compile`` the same file gets another comparison. A file with lines of another
configuration, version, device, commit, number of ranks or plugin, or of other environment variables (A2A_FFN_*, NCCL_*,
...), is refused.

By default all modes that this torch can run, and the shapes of reports/shapes: development, default, and 32 of the
held-out range, drawn and committed before they are run:

    python research_topic_2/sweep.py --draw 32 --seed 7 --shapes reports/shapes/held_out_32.json

draws from the range of the assignment: 1 <= B <= 512 (evenly by its logarithm), 16 <= T <= 64 (multiples of 8, so that
2, 4 and 8 ranks divide them), 128 <= D <= 1280 with T dividing D, k in {2, 3, 6}.

At the end a table holds each mode's ratio to none per shape, with a 95 % confidence interval of the ratio of medians
(2,000 bootstrap samples of the iterations' slowest ranks), and the geometric mean over the shapes. The exit status is 1
where a check failed: a variant's is measured all the same, a plain mode's ends the sweep.
"""

import argparse
import contextlib
import gc
import json
import math
import random
import sys
from pathlib import Path

import torch

import results_file
from compare import build_parser as comparison_parser
from compare import check_modes, compare
from rankmixer import plugins, record, variants
from rankmixer.cli import pass_name
from rankmixer.options import configuration, validate
from rankmixer.runtime import choose_device, environment_rank, leave, start_runtime, stop_runtime
from rankmixer.workload import Workload
from results_file import SHAPE

MODES = ("none", "with-sm", "sm-free", "kernel", "kernel:TRANSPORT=collectives")  # kernel: by the peers where it can
BUILT_IN = ("none:inductor-reorder", "kernel:inductor-reorder", "none:inductor-overlap", "kernel:inductor-overlap")
SHAPES = tuple(str(Path(__file__).resolve().parents[1] / "reports" / "shapes" / f"{name}.json")
               for name in ("development", "default", "held_out_32"))
MOST_SHAPES = 1000


class Refused(ValueError):
    """What the main rank's file does not take; raised on every rank."""


def build_parser():
    """The comparison's flags, with lists of shapes instead of one."""
    parser = comparison_parser()
    parser.prog, parser.description = "sweep.py", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", nargs="+", metavar="FILE",
                        help="JSON files, each a list of [B, T, D, k] (default: those of reports/shapes)")
    parser.add_argument("--output", metavar="FILE", help="the results file, JSON lines; appended to where it exists")
    parser.add_argument("--draw", type=int, metavar="N", help="write N shapes to --shapes, drawn with --seed, and exit")
    parser.set_defaults(modes=None, warmup=5, num_tests=30)
    return parser


def all_modes(no_compile):
    """All modes that can run here, kernel by collectives too; Inductor's own passes where compiled and this torch has them."""
    return ",".join([*MODES, *(name for name in BUILT_IN if not no_compile and _known(name))])


def _known(name):
    try:
        return bool(variants.parse(name))
    except ValueError:
        return False


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


def table(summary):
    """The summary of a comparison as text."""
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
            return _draw(options)
        device, shapes = _prepared(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"error (rank {environment_rank()[0]}): {error}", file=sys.stderr, flush=True)
        return 2
    runtime = start_runtime(device)
    try:
        status = _run(parser, options, runtime, shapes)
    except (AssertionError, Refused) as error:  # raised on every rank
        print(f"{type(error).__name__} (rank {runtime.rank}): {error}", file=sys.stderr, flush=True)
        status = 1 if isinstance(error, AssertionError) else 2
    stop_runtime()
    return status


def _draw(options):
    if not options.shapes or len(options.shapes) != 1:
        raise ValueError(f"shapes={options.shapes}: must be the one file that --draw writes")
    path = Path(options.shapes[0])
    shapes = draw_shapes(options.draw, options.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shapes) + "\n")
    return 0


def _prepared(options):
    """(device, shapes); every value is checked, and the plugin loaded where a mode needs it."""
    device, world_size = choose_device(options.device), environment_rank()[1]
    files = options.shapes or SHAPES
    shapes = list(dict.fromkeys(tuple(shape) for path in files for shape in read_shapes(path, world_size)))
    options.modes = options.modes or all_modes(options.no_compile)
    modes = check_modes(options)
    if options.output is None:
        raise ValueError("output=None: must be the results file")
    if any(name.startswith("kernel") for name in modes):
        plugins.load_plugin()
    for shape in shapes:
        _set_shape(options, shape)
        validate(options, world_size, device)
    return device, shapes


def _run(parser, options, runtime, shapes):
    """Measure what the file lacks, and print the comparison; returns the exit status. Raises `Refused`."""
    expected = _identity(parser, options, runtime)
    with contextlib.ExitStack() as held:
        done = agreed(runtime, lambda: _shapes_in(options.output, expected, held))
        missing = [shape for shape in shapes if shape not in done]
        runtime.print(f"{len(shapes) - len(missing)} of {len(shapes)} shapes are in {options.output}")
        for index, shape in enumerate(missing, 1):
            runtime.print(f"\nshape {index} of {len(missing)}: {shape}")
            _set_shape(options, shape)
            result = {**_measured(parser, options, runtime), "variables": results_file.variables()}
            agreed(runtime, lambda: results_file.append(options.output, result))
        text, wrong = agreed(runtime, lambda: _outcome(options.output, expected, shapes))
    runtime.print(text)
    for each in wrong if runtime.is_main else ():
        print(f"check failed: {each}", file=sys.stderr, flush=True)
    return 1 if wrong and runtime.is_main else 0


def _outcome(path, expected, shapes):
    """(the table, what failed a check) of these shapes."""
    lines = _comparison_in(results_file.read(path), expected)
    records = [each for each in lines if results_file.shape_of(each) in shapes]
    wrong = [f"{mode} at {results_file.shape_of(each)}: {outcome['problem']}" for each in records
             for mode, outcome in each["checks"].items() if "problem" in outcome]
    return table(results_file.summarize(records)), wrong


def _identity(parser, options, runtime):
    """What a record of this run will say of its stack and settings."""
    kernel = any(name.startswith("kernel") for name in options.modes.split(","))
    return {"configuration": configuration(parser, options), "environment": record.environment(runtime.device),
            "world_size": runtime.world_size, "pass": pass_name(options), "variables": results_file.variables(),
            "plugin": plugins.plugin_name() if kernel else None}


def _shapes_in(path, expected, held):
    """The shapes that the file has; ``held`` keeps other sweeps from it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    held.enter_context(results_file.only_sweep(path))
    lines = results_file.read(path)
    results_file.require_same(path, lines, expected)
    return {results_file.shape_of(line) for line in _comparison_in(lines, expected)}


def _comparison_in(lines, expected):
    return [line for line in lines if results_file.comparison_of(line) == results_file.comparison_of(expected)]


def agreed(runtime, function):
    """The main rank's result of ``function()``, on every rank; or its error, as `Refused` on every rank."""
    outcome = None
    if runtime.is_main:
        try:
            outcome = function(), None
        except Exception as error:  # the other ranks are waiting to be told
            outcome = None, str(error) if isinstance(error, (ValueError, OSError)) else repr(error)
    value, problem = runtime.gather(outcome)[0]
    if problem is not None:
        raise Refused(problem)
    return value


def _set_shape(options, shape):
    for name, value in zip(SHAPE, shape, strict=True):
        setattr(options, name, value)


def _measured(parser, options, runtime):
    workload = Workload(options, runtime)
    result = compare(parser, options, workload)
    del workload
    gc.collect()
    torch.compiler.reset()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    leave(main())
