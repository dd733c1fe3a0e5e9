"""Training through the peers' memory: what surrounds the layer in use. On CPU, the operators played by gloo.

Two layers, one of them checkpointed, gradients accumulated over two batch sizes, under DistributedDataParallel, which
leaves the experts' weights alone: weights as with collectives, but for the last bits (the CPU's GEMM of few rows sums in an
order that depends on where its result lies).
"""

import os

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, RANKS = 8, 32, 2


class _Model(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.into, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.first, self.second = (
            ArchiveFFN(TOKENS, WIDTH, 2, group=dist.group.WORLD, size=RANKS, index=rank) for _ in range(2)
        )

    def forward(self, x):
        def first(t):
            return self.first(t, overlap="kernel")

        y = checkpoint(first, self.into(x), use_reentrant=False)
        return self.out(self.second(y, overlap="kernel"))


def _steps(rank, steps=2):
    torch.manual_seed(3)
    model = _Model(rank)
    experts = [f"{layer}.{name}" for layer in ("first", "second") for name, _ in getattr(model, layer).named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kept = []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in (3, 2):
            with torch.no_grad():  # an evaluation in between: another plan, the same buffers
                kept.append(model(torch.full((batch, TOKENS, WIDTH), 0.5)))
            x = torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            replicated(x).square().mean().backward()
        optimizer.step()
    copies = [output.clone() for output in kept]
    model(torch.randn(4, TOKENS, WIDTH))
    assert all(torch.equal(*pair) for pair in zip(kept, copies)), "a later call wrote to what an earlier one returned"
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _train(rank):
    import compile_overlap
    import passes
    import peers_by_gloo

    os.environ.update(A2A_FFN_STRICT="1", A2A_FFN_RECIPE="eager_exact", A2A_FFN_CHUNKS="2")
    expected, start = _steps(rank), _steps(rank, steps=0)
    compile_overlap.reset()
    torch._dynamo.reset()
    peers_by_gloo.install()
    os.environ["A2A_FFN_TRANSPORT"] = "peers"
    before = len(passes.pass_log())
    got = _steps(rank)
    lowered = sum(report.name == "lower-to-peers" for report in passes.pass_log()[before:])
    moved = min(float((got[name] - start[name]).abs().max()) for name in got)
    return max(float((got[name] - expected[name]).abs().max()) for name in got), moved, lowered


@pytest.mark.parametrize("ranks", [RANKS])
def test_weights_after_training_are_the_collectives(ranks, tmp_path):
    for difference, moved, lowered in run_on_ranks(_train, ranks, tmp_path):
        assert difference < 1e-5 and lowered >= 6
        assert moved > 1e-4
