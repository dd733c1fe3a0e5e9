"""Runs a function on ranks, one process each, and returns what each rank returned."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent


def run_on_ranks(job, ranks, folder, environment=None, start=None, limit_s=400):
    """`job(rank) -> anything torch.save takes` on `ranks` processes; the results in rank order.

    `start(rank, ranks, folder)` makes the process group, gloo's by default. A rank that takes more than `limit_s`
    seconds prints where each of its threads is and fails the call.
    """
    arguments = (job, ranks, str(folder), environment or {}, start or start_gloo, limit_s)
    mp.spawn(_main, args=arguments, nprocs=ranks, join=True)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def start_gloo(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def _main(rank, job, ranks, folder, environment, start, limit_s):
    faulthandler.dump_traceback_later(limit_s, exit=True)
    sys.path[:0] = [str(ROOT), str(TESTS), str(ROOT / "research_topic_2")]
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.update(environment)
    # A graph from an earlier run's cache is not compiled, and then no pass runs that a test could see.
    functorch_config.enable_autograd_cache = False
    inductor_config.fx_graph_cache = False
    start(rank, ranks, folder)
    torch.save(job(rank), Path(folder) / f"{rank}.pt")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    # Nothing is freed: gloo's destructor joins its thread while it holds the interpreter's lock, for which that thread
    # may be waiting (torch 2.6.0: one run in twenty never ends).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
