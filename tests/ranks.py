"""Runs a function on gloo ranks, one process each, and returns what each rank returned."""

from __future__ import annotations

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


def run_on_ranks(job, ranks, folder, environment=None):
    """`job(rank) -> anything torch.save takes` on `ranks` gloo processes; the results in rank order."""
    mp.spawn(_main, args=(job, ranks, str(folder), environment or {}), nprocs=ranks, join=True)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _main(rank, job, ranks, folder, environment):
    sys.path[:0] = [str(ROOT), str(TESTS), str(ROOT / "research_topic_2")]
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.update(environment)
    # A graph from an earlier run's cache is not compiled, and then no pass runs that a test could see.
    functorch_config.enable_autograd_cache = False
    inductor_config.fx_graph_cache = False
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(job(rank), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
