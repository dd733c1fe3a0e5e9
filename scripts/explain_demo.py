"""Prints what the layer does for one call: `compile_overlap.explain` on the benchmark's FFN. Launch with torchrun.

python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/explain_demo.py B T D k
"""

import sys
from pathlib import Path

import torch

import compile_overlap

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "research_topic_2"))

from rankmixer.ffn import PerTokenFFN  # noqa: E402
from rankmixer.runtime import choose_device, leave, start_runtime, stop_runtime  # noqa: E402


def main(batch, tokens, dim, k):
    runtime = start_runtime(choose_device(None))
    torch.manual_seed(42 + runtime.rank)
    ffn = PerTokenFFN(tokens, dim, k, device=runtime.device)
    inputs = torch.randn(batch, tokens, dim, device=runtime.device, dtype=torch.bfloat16)
    text = compile_overlap.explain(ffn, inputs)  # on every rank: it may take the decision, which is collective
    runtime.print(text)
    runtime.barrier()  # a rank that left early would break the others' connections
    stop_runtime()


if __name__ == "__main__":
    leave(main(*map(int, sys.argv[1:5])))
