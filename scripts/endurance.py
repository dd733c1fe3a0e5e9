#!/usr/bin/env python
"""Makes many calls whose shapes change and counts what they leave behind; fails where something grew beyond its bound.

    torchrun --standalone --nproc-per-node 2 scripts/endurance.py --device cpu --json FILE      # two gloo ranks
    torchrun --standalone --nproc-per-node 2 scripts/endurance.py --json FILE                   # a GPU for each rank

Batch sizes go round, inference and training (forward and backward) take turns. Every rank counts after the first calls,
when each configuration has been compiled, then once in a while, and at the end: resident memory, memory allocated on the
device, open files, compiled layers, and compilations by Dynamo. Memory that allocators settle by is the bound's size;
of the rest nothing may grow. `--keep` lowers the number of layers that are kept below the number of configurations, so
that layers are dropped and compiled again; then `--per-compilation` is the memory that each compilation may leave.

Exit status: 1 where a rank's count grew beyond its bound.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]
os.environ.setdefault("A2A_FFN_KERNEL_PLUGIN", "compile_overlap")

import torch  # noqa: E402
from rankmixer import record  # noqa: E402
from rankmixer.ffn import PerTokenFFN  # noqa: E402
from rankmixer.runtime import choose_device, leave, start_runtime, stop_runtime  # noqa: E402

from compile_overlap import compiler, watched  # noqa: E402

MiB = 1 << 20


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    least = 2 * len(options.batch_sizes)
    if options.calls < least or (options.keep is not None and options.keep < 1):
        parser.error(f"--calls {options.calls}, --keep {options.keep}: must be at least {least}, the configurations, and 1")
    runtime = start_runtime(choose_device(options.device))
    if options.keep:
        compiler.MAX_LAYERS = options.keep
    with watched(runtime.group):
        result = _run(options, runtime)
    try:
        record.validate(result)
        runtime.print("nothing grew beyond its bound")
        if options.json and runtime.is_main:
            record.write(result, options.json)
        status = 0
    except ValueError as error:
        runtime.print(f"error: {error}")
        status = 1
    runtime.barrier()
    stop_runtime()
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=None, help="(default: cuda where there is one)")
    add("--calls", type=int, default=10000, help="(default: %(default)s)")
    add("--batch-sizes", type=_sizes, default="1,2,3,4,6,8,12,16", help="rows per rank, in turn (default: %(default)s)")
    add("--tokens", type=int, default=16, help="T (default: %(default)s)")
    add("--dim", type=int, default=64, help="D (default: %(default)s)")
    add("--k", type=int, default=2, help="expansion (default: %(default)s)")
    add("--keep", type=int, help="compiled layers that are kept (default: the package's bound)")
    add("--memory", type=int, default=32, help="MiB that a rank's memory may grow by (default: %(default)s)")
    add("--per-compilation", type=float, default=0.5, help="MiB more for each compilation (default: %(default)s)")
    add("--json", metavar="FILE", help="write the record here (rank 0)")
    return parser


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError
    return sizes


def _run(options, runtime) -> dict:
    torch.manual_seed(runtime.rank)
    ffn = PerTokenFFN(options.tokens, options.dim, options.k, dtype=torch.bfloat16, device=runtime.device)
    sizes = options.batch_sizes
    configurations = 2 * len(sizes)
    counts, begin = [], time.monotonic()
    for call in range(configurations + options.calls):
        _call(ffn, runtime, options, sizes[call // 2 % len(sizes)], training=call % 2 == 1)
        warm = call + 1 - 2 * configurations  # by the second round everything has been made that a call makes
        if warm >= 0 and (warm % max(1, options.calls // 10) == 0 or call + 1 == configurations + options.calls):
            counts.append(_counts(runtime))
            runtime.print(f"{call + 1} calls, {time.monotonic() - begin:.0f} s: {_text(counts[-1])}")
    recompiled = counts[-1]["compilations"] - counts[0]["compilations"]
    memory = options.memory * MiB + int(recompiled * options.per_compilation * MiB)
    dropping = options.keep is not None and options.keep < configurations
    bounds = {"resident_bytes": memory, "device_bytes": MiB, "files": 0, "layers": 0,
              "compilations": options.calls if dropping else 0}  # fmt: skip
    ranks = [{"warm": each[0], "last": each[-1]} for each in runtime.gather(counts)]
    return {
        "schema": record.SCHEMA_VERSION, "kind": "endurance", "environment": record.environment(runtime.device),
        "world_size": runtime.world_size, "calls": options.calls, "configurations": configurations,
        "kept": options.keep or compiler.MAX_LAYERS, "ranks": ranks, "bounds": bounds, "rank0": counts,
    }  # fmt: skip


def _call(ffn, runtime, options, rows: int, training: bool) -> None:
    inputs = torch.randn(rows, options.tokens, options.dim, device=runtime.device, dtype=torch.bfloat16)
    with torch.set_grad_enabled(training):
        output = ffn(inputs.requires_grad_(training), overlap="kernel")
    if training:
        output.float().square().mean().backward()
        ffn.zero_grad(set_to_none=True)


def _counts(runtime) -> dict[str, int]:
    gc.collect()
    runtime.synchronize()
    cuda = runtime.device.type == "cuda"
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident_bytes": resident,
        "device_bytes": torch.cuda.memory_allocated(runtime.device) if cuda else 0,
        "files": len(os.listdir("/proc/self/fd")),
        "layers": len(compiler._LAYERS),
        "compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def _text(counts: dict[str, int]) -> str:
    memory = f"{counts['resident_bytes'] / MiB:.1f} MiB resident, {counts['device_bytes'] / MiB:.1f} MiB on the device"
    return f"{memory}, {counts['files']} files, {counts['layers']} layers, {counts['compilations']} compilations"


if __name__ == "__main__":
    leave(main())
