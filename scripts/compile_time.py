#!/usr/bin/env python
"""Measures what chunking costs the compiler: the layer at several chunk counts, cold and with a warm cache.

    python scripts/compile_time.py                     # the layer by itself, compiled by its own backend
    python scripts/compile_time.py --block             # the whole block in torch.compile, the layer inlined

Each row is a process of its own on torch's fake process group, as one rank of `--ranks`, on CPU or on one GPU. Cold has
an empty cache folder; warm is a second process with the same folder. Forward is the first call; backward the first
backward, where it is compiled. Neither includes imports, nor what a first trivial compilation sets up. `none` is the
sequential reference under torch.compile.

Kernels are counted in the wrappers that Inductor writes: how many are defined, how often they are called, and how many
definitions have a body of their own. A definition more than bodies is a kernel that was compiled twice. Equal chunks
that share their kernels add calls and no definitions.

Exit status: 1 when a cold compilation at four chunks takes more than `--limit` times the unchunked layer's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NONE = "none"
UNCHUNKED, JUDGED = "1", "4"
PHASES = ("forward", "backward")
_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(.*?'''(.*?)'''", re.MULTILINE | re.DOTALL)
_EXTERN = re.compile(r"^\s+.*\bextern_kernels\.\w+\(", re.MULTILINE)
_EXCHANGE = re.compile(r"^\s+.*torch\.ops\._c10d_functional\.all_to_all_single\b", re.MULTILINE)


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chunks", default="1,4,8", help="chunk counts, comma-separated (default: %(default)s)")
    add("--recipe", choices=("inductor", "eager_exact"), default="inductor",
        help="the layer's numeric recipe; the inlined block always has inductor (default: %(default)s)")
    add("--block", action="store_true", help="the whole block in one torch.compile instead of the layer by itself")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--ranks", type=int, default=2, help="ranks of the fake process group (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="rows per rank, B (default: %(default)s)")
    add("--tokens", type=int, default=32, help="T; eight chunks need 16 for each rank (default: %(default)s)")
    add("--dim", type=int, default=128, help="D (default: %(default)s)")
    add("--k", type=int, default=2, help="expansion, H = D * k (default: %(default)s)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="(default: %(default)s)")
    add("--limit", type=float, default=2.0, help="allowed ratio of cold at four chunks to one (default: %(default)s)")
    add("--profile", metavar="FOLDER", help="write FOLDER/<name>.prof of each cold compilation (read it with pstats)")
    add("--json", metavar="FILE", help="write everything that was measured here")
    add("--measure", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def main(arguments=None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options, options.measure)))
        return 0
    counts = options.chunks.split(",")
    if not all(count.isdecimal() and int(count) >= 1 for count in counts):
        parser.error(f"--chunks {options.chunks!r}: must be positive counts separated by commas")
    if options.block and options.recipe != "inductor":
        parser.error("--block: the layer is inlined with the recipe inductor")
    passed_on = sys.argv[1:] if arguments is None else list(arguments)
    results = {name: run_twice(passed_on, name) for name in (NONE, *counts)}
    print("\n".join(table(options, results)))
    status, verdict = judge(results, options.limit)
    print(verdict)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")
    return status


def run_twice(arguments, name):
    """{"cold": ..., "warm": ...} as `measure` returns it, from two processes that share a cache folder."""
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton",
                       "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "A2A_FFN_STRICT": "1"}
        for state in ("cold", "warm"):
            command = [sys.executable, __file__, *arguments, "--measure", name]
            child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[state] = json.loads(child.stdout.splitlines()[-1])
            arguments = [*arguments, "--profile", ""]
    return results


def measure(options, name):
    """Compile and run forward and backward once: {phase: {"seconds", "definitions", "bodies", "calls", ...}}."""
    sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from compile_overlap import compat

    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    wrappers: list[str] = []
    call, inputs = _workload(options, name)
    _set_up(torch, inputs)
    compat.watch_wrappers(wrappers.append)
    profiler = _profiler(options)
    result = {}

    def timed(phase, function):
        wrappers.clear()
        begin = time.perf_counter()
        with profiler:
            value = function()
            if inputs.is_cuda:
                torch.cuda.synchronize()
        result[phase] = {"seconds": time.perf_counter() - begin, **count_kernels(wrappers)}
        return value

    output = timed("forward", lambda: call(inputs))
    upstream = torch.ones_like(output)
    timed("backward", lambda: output.backward(upstream))
    if options.profile:
        Path(options.profile).mkdir(parents=True, exist_ok=True)
        profiler.dump_stats(str(Path(options.profile) / f"{name}.prof"))
    dist.destroy_process_group()
    return result


def _workload(options, name):
    """(call, inputs): the layer or the block, `none` or in `name` chunks."""
    import torch
    from rankmixer.block import RankMixerBlock
    from rankmixer.options import DTYPES

    from compile_overlap import forward_ffn

    if name != NONE:
        os.environ |= {"A2A_FFN_CHUNKS": name, "A2A_FFN_RECIPE": options.recipe, "A2A_FFN_BIAS": "add"}
    torch.manual_seed(0)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    block = RankMixerBlock(options.tokens, options.dim, options.k, dtype=dtype, device=device)
    shape = (options.batch_size, options.tokens, options.dim)
    inputs = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    if name != NONE and not options.block:
        return (lambda x: forward_ffn(block.ffn, x)), inputs
    if name != NONE:
        os.environ["A2A_FFN_KERNEL_PLUGIN"] = "compile_overlap"
        block.ffn.load_plugin()
    module, overlap = (block if options.block else block.ffn), NONE if name == NONE else "kernel"
    return torch.compile(lambda x: module(x, overlap=overlap), dynamic=False), inputs


def _set_up(torch, like):
    """What the first compilation of a process does once: imports, finding compilers, headers, worker processes."""
    import torch._inductor.compile_fx  # noqa: F401

    x = like.detach()[:1].clone().requires_grad_()
    torch.compile(lambda x: x.sigmoid(), dynamic=False)(x).sum().backward()


def _profiler(options):
    import contextlib
    import cProfile

    return cProfile.Profile() if options.profile else contextlib.nullcontext()


def count_kernels(wrappers):
    """Kernels that the wrappers define, different bodies among them, and calls; extern calls and exchanges.

    All zero where the code came from a cache.
    """
    definitions = [found for code in wrappers for found in _DEFINITION.findall(code)]
    calls = 0
    for code in wrappers:
        names = "|".join(name for name, _ in _DEFINITION.findall(code))
        calls += len(re.findall(rf"^\s+(?:{names})(?:\.run)?\(", code, re.MULTILINE)) if names else 0
    bodies = {body.replace(name, "kernel") for name, body in definitions}
    return {"definitions": len(definitions), "bodies": len(bodies), "calls": calls,
            "extern": sum(len(_EXTERN.findall(code)) for code in wrappers),
            "exchanges": sum(len(_EXCHANGE.findall(code)) for code in wrappers)}


def table(options, results):
    what = "block, layer inlined" if options.block else f"layer, recipe {options.recipe}"
    yield (f"{what}: P={options.ranks} B={options.batch_size} T={options.tokens} D={options.dim} k={options.k} "
           f"{options.dtype} on {options.device}; seconds to compile; kernels defined (bodies) and called")
    yield (f"{'chunks':<8}{'phase':<10}{'cold':>8}{'warm':>8}{'of C=1':>8}{'defined':>9}{'bodies':>8}{'called':>8}"
           f"{'extern':>8}{'exchanges':>11}")
    for name, states in results.items():
        for phase in PHASES:
            cold, warm = states["cold"][phase], states["warm"][phase]
            whole = results.get(UNCHUNKED, {}).get("cold", {}).get(phase)
            ratio = f"{cold['seconds'] / whole['seconds']:.2f}" if whole else "-"
            yield (f"{name:<8}{phase:<10}{cold['seconds']:>8.2f}{warm['seconds']:>8.2f}{ratio:>8}"
                   f"{cold['definitions']:>9}{cold['bodies']:>8}{cold['calls']:>8}{cold['extern']:>8}"
                   f"{cold['exchanges']:>11}")


def total(results, name, state):
    return sum(results[name][state][phase]["seconds"] for phase in PHASES)


def judge(results, limit):
    """(exit status, sentence) on cold at four chunks against the unchunked layer."""
    if not {UNCHUNKED, JUDGED} <= results.keys():
        return 0, "not judged: needs --chunks with 1 and 4"
    ratios = {phase: results[JUDGED]["cold"][phase]["seconds"] / results[UNCHUNKED]["cold"][phase]["seconds"]
              for phase in PHASES}
    ratio = total(results, JUDGED, "cold") / total(results, UNCHUNKED, "cold")
    within = ratio <= limit
    return int(not within), (
        f"cold at C=4 takes {ratio:.2f} times the unchunked layer's (forward {ratios['forward']:.2f}, backward "
        f"{ratios['backward']:.2f}), {total(results, JUDGED, 'cold') / total(results, NONE, 'cold'):.2f} times that of "
        f"none: {'within' if within else 'NOT within'} the limit of {limit:g}")


if __name__ == "__main__":
    sys.exit(main())
