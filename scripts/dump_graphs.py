#!/usr/bin/env python3
"""Shows what the compiler and our passes do for one configuration: graphs, schedules, generated code, a report.

    python scripts/dump_graphs.py                                   # P=2, a small shape, CPU, forward and backward
    python scripts/dump_graphs.py --ranks 16 --chunks 2,6 --block   # the whole block compiled, uneven chunks
    python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/dump_graphs.py --device cuda

Writes OUTPUT/rank0/ (rank1/, ... under torchrun, or with --rank):

    index.html     timelines of the schedules, anchors beside the order in the generated code, the passes
    graphs/        the captured, joint, forward and backward graphs, and every pass's input and output
    code/          the wrappers that Inductor generated
    schedules/     the schedules as text
    depyf/         what depyf decompiles, where it is installed
    plan.txt       the configuration and its plan
    dump.json      the settings and a hash of each graph; ranks are compared by it

Without torchrun the ranks are torch's fake process group: everything is compiled and run as one rank of P, the other
ranks' data is arbitrary. Compiled code goes to a folder that is removed at the end; existing caches are not touched.
A2A_FFN_* settings that no flag covers (A2A_FFN_IN_FLIGHT, A2A_FFN_COSTS, A2A_FFN_DISABLE_PASSES, ...) are followed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKER = "dump.json"
TOKENS_PER_RANK = 8
_BEGIN = time.perf_counter()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line. Raises ValueError for flags that contradict one another or the environment."""
    parser = argparse.ArgumentParser(
        prog="dump_graphs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("dumps"), metavar="DIR", help="where to write (default: dumps)")
    add("--ranks", type=int, metavar="P", help="expert-parallel ranks (default: 2; torchrun's number under torchrun)")
    add("--rank", type=int, metavar="R", help="the rank to run as on the fake group (default: 0)")
    add("--batch-size", type=int, default=2, help="rows per rank, B (default: 2)")
    add("--tokens", type=int, help=f"tokens, T, a multiple of the ranks (default: {TOKENS_PER_RANK} for each rank)")
    add("--dim", type=int, help="token width, D, a multiple of T (default: T, at least 32)")
    add("--k", type=int, default=2, help="expansion, H = D * k (default: 2)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of inputs and parameters (default: bf16)")
    add("--chunks", help="a count, or sizes such as 2,6 (default: the plan's choice, four where nothing is measured)")
    add("--recipe", choices=("eager_exact", "inductor"), help="default: eager_exact; inductor with --block")
    add("--block", action="store_true", help="compile the whole block, which inlines the layer (default: the layer)")
    add("--backward", action=argparse.BooleanOptionalAction, default=True, help="also the backward (default: yes)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    options = parser.parse_args(arguments)
    launched = "RANK" in os.environ
    world = int(os.environ.get("WORLD_SIZE", 1))
    if launched and options.ranks not in (None, world):
        raise ValueError(f"--ranks {options.ranks}: torchrun started {world} ranks; leave --ranks out")
    if launched and options.rank is not None:
        raise ValueError(f"--rank {options.rank}: torchrun decides the ranks; leave --rank out")
    options.launched = launched
    options.ranks = world if launched else 2 if options.ranks is None else options.ranks
    options.rank = int(os.environ["RANK"]) if launched else options.rank or 0
    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: must be at least 1")
    if not 0 <= options.rank < options.ranks:
        raise ValueError(f"--rank {options.rank}: must be one of 0 to {options.ranks - 1}")
    if options.tokens is None:
        options.tokens = TOKENS_PER_RANK * options.ranks
    if options.dim is None:
        options.dim = options.tokens * -(-32 // max(options.tokens, 1))
    wanted = options.recipe or os.environ.get("A2A_FFN_RECIPE")
    if options.block and wanted == "eager_exact":
        raise ValueError("recipe eager_exact with --block: inside a compiled block the recipe is inductor")
    options.recipe = wanted or ("inductor" if options.block else "eager_exact")
    return options


def set_environment(options: argparse.Namespace, caches: str) -> None:
    """Settings of this process, before torch is imported: cold caches of its own, nothing probed, no delegation."""
    own = {
        "TORCHINDUCTOR_CACHE_DIR": caches,
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "A2A_FFN_KERNEL_PLUGIN": "compile_overlap",
        "A2A_FFN_RECIPE": options.recipe,
        "A2A_FFN_STRICT": "1",
    }
    for cache in ("FX_GRAPH_CACHE", "FX_GRAPH_REMOTE_CACHE", "AUTOGRAD_CACHE", "AUTOGRAD_REMOTE_CACHE"):
        own[f"TORCHINDUCTOR_{cache}"] = "0"
    if options.chunks is not None:
        own["A2A_FFN_CHUNKS"] = options.chunks
    os.environ.update(own)
    os.environ.setdefault("A2A_FFN_BIAS", "add")
    if options.device == "cpu":
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2"), str(ROOT / "scripts")]


def start_group(options: argparse.Namespace, device):
    """The benchmark's runtime: torchrun's group (NCCL, or gloo on CPU), else the fake group."""
    import torch
    import torch.distributed as dist
    from rankmixer.runtime import Runtime, start_runtime
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if options.launched:
        return start_runtime(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", rank=options.rank, world_size=options.ranks, store=FakeStore())
    return Runtime(options.rank, options.ranks, device, dist.group.WORLD)


def workload_options(options: argparse.Namespace, device) -> argparse.Namespace:
    """The benchmark's options for this run, checked. Raises ValueError."""
    from rankmixer.options import add_common_options, validate

    parser = argparse.ArgumentParser()
    add_common_options(parser)
    names = ("batch_size", "tokens", "dim", "k", "dtype", "device")
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    flags += ["--backward"] * options.backward + ["--no-compile"] * (not options.block)
    chosen = parser.parse_args(flags)
    validate(chosen, options.ranks, device)
    return chosen


def prepare_folder(options: argparse.Namespace) -> Path:
    """An empty folder for this rank; an earlier dump there is removed, anything else is a ValueError."""
    folder = options.output / f"rank{options.rank}"
    if folder.exists():
        if not (folder / MARKER).is_file():
            raise ValueError(f"--output {options.output}: {folder} exists and is not a dump of this tool")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--output {options.output}: cannot be written, {error}") from error
    (folder / MARKER).write_text("{}")
    return folder.resolve()


@contextlib.contextmanager
def depyf_dump(folder: Path, say):
    """depyf's dump of everything that is compiled in the context; yields without it where it is not installed."""
    try:
        import depyf
    except ImportError:
        say("depyf is not installed here: no depyf/ folder")
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with depyf.prepare_debug(str(folder)):
            yield


def plan_text(options: argparse.Namespace, plan, layout) -> str:
    """The configuration and its plan, one fact a line."""
    import torch

    scope = "the whole block, layer inlined" if options.block else "the layer, called from eager code"
    group = "torchrun's processes" if options.launched else "fake process group"
    followed = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith("A2A_FFN_"))
    rows = {
        "layout": f"P={layout.P} B={layout.B} T={layout.T} D={layout.D} H={layout.H} L={layout.L}, {options.dtype}",
        "ranks": f"rank {options.rank} of {options.ranks}, {group}, {options.device}",
        "compiled": f"{scope}; {'forward and backward' if options.backward else 'forward'}; torch {torch.__version__}",
        "recipe": f"{options.recipe}, bias form {os.environ['A2A_FFN_BIAS']}",
        "plan": str(plan),
        "chunks": f"{len(plan.sizes)} along L, of {', '.join(map(str, plan.sizes))} tokens",
        **{name: str(value or "none") for name, value in vars(plan).items() if name != "sizes"},
        "settings": " ".join(followed),
    }
    return "".join(f"{key:<13}{value}\n" for key, value in rows.items())


def compare_ranks(folder: Path, settings: dict, digests: dict[str, str]) -> list[str]:
    """One line for each other rank's dump of the same configuration beside this one."""
    lines = []
    for other in sorted(folder.parent.glob(f"rank*/{MARKER}"), key=lambda path: (len(path.parts[-2]), path)):
        if other.parent == folder:
            continue
        theirs = json.loads(other.read_text() or "{}")
        if theirs.get("settings") != settings or not theirs.get("digests"):
            continue
        keys = {**digests, **theirs["digests"]}
        different = [name for name in keys if digests.get(name) != theirs["digests"].get(name)]
        verdict = f"DIFFERENT: {', '.join(different)}" if different else "the same graphs and schedules"
        lines.append(f"{other.parent.name}: {verdict}")
    return lines


def dump(options: argparse.Namespace, say) -> Path:
    """Compile and run the configuration once and write everything; returns the report's path."""
    say(f"P={options.ranks} B={options.batch_size} T={options.tokens} D={options.dim} k={options.k} {options.dtype}, "
        f"{options.device}, {'whole block' if options.block else 'layer'}, recipe {options.recipe}")
    import torch
    from rankmixer.runtime import choose_device, stop_runtime
    from rankmixer.workload import Workload

    from compile_overlap import api
    from compile_overlap.config import Settings
    from compile_overlap.layout import check_call
    from graph_recorder import Recorder
    from graph_report import write_report

    if options.device == "cpu":
        torch.set_num_threads(1)
    device = choose_device(options.device)
    chosen = workload_options(options, device)
    runtime = start_group(options, device)
    workload = Workload(chosen, runtime)
    layout = check_call(workload.block.ffn, workload.inputs)
    with torch.set_grad_enabled(options.backward):
        plan = api.plan_for(workload.block.ffn, layout, Settings.from_environment())
    folder = prepare_folder(options)
    facts = plan_text(options, plan, layout)
    (folder / "plan.txt").write_text(facts)
    say(f"plan {plan}")
    if (options.chunks or "").isdigit() and int(options.chunks) != len(plan.sizes):
        say(f"of the {options.chunks} chunks asked for {len(plan.sizes)} fit here (compile_overlap/plan.py)")

    recorder = Recorder(options.backward, os.environ["TORCHINDUCTOR_CACHE_DIR"], say)
    what = "forward and backward" if options.backward else "forward"
    say(f"compiling {what} with cold caches, which takes up to a few minutes for large shapes")
    error = None
    try:
        with depyf_dump(folder / "depyf", say), recorder.recording():
            if options.backward:
                workload.run_gradients("kernel", workload.inputs, workload.upstream)
            else:
                workload.run_forward("kernel", workload.inputs)
    except Exception as failure:
        error = failure
        raise
    finally:
        hidden = ("output", "rank", "launched")
        settings = {key: value for key, value in vars(options).items() if key not in hidden}
        settings |= {key: value for key, value in os.environ.items() if key.startswith("A2A_FFN_")}
        settings["torch"] = torch.__version__
        recorder.write(folder)
        digests = {} if error else recorder.digests()
        (folder / MARKER).write_text(json.dumps({"settings": settings, "digests": digests}, indent=1) + "\n")
        if error is None and options.launched:
            runtime.barrier()
        ranks = [] if error else compare_ranks(folder, settings, digests)
        index = write_report(folder, facts, recorder, ranks, error)
        if error is not None:
            say(f"the run failed; what was recorded until then: {index}")
    stop_runtime()
    for line in ranks:
        say(line)
    if any("DIFFERENT" in line for line in ranks):
        raise ValueError("the ranks' graphs differ; they would wait for one another forever")
    return index


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status: 2 for a mistake that the message explains."""
    rank = os.environ.get("RANK", "0")

    def say(text: str) -> None:
        if rank == "0":
            print(f"[{time.perf_counter() - _BEGIN:5.1f} s] {text}", flush=True)

    try:
        options = parse(arguments)
        with tempfile.TemporaryDirectory(prefix="dump_graphs_") as caches:
            set_environment(options, caches)
            index = dump(options, say)
        say("done; open this file in a browser:")
        if rank == "0":
            print(index)
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
