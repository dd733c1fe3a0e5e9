"""A group that spans hosts: the ranks of a host exchange through their memory, the others' rows travel by collectives.

Hosts are pretended. The group is a part of a larger world, of which the other rank takes part in nothing. On CPU, with
memory that processes share in the place of symmetric memory and ATen's GEMM in that of ours.
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from gradients import outputs_and_gradients, unequal
from ranks import run_on_ranks

from compile_overlap import layout, rooms, transport
from compile_overlap.config import Settings
from compile_overlap.known_plans import Problem

RANKS, PER_HOST, BATCH, TOKENS, WIDTH = 4, 2, 8, 16, 32


def _two_levels(rank, folder):
    import compile_overlap
    import passes
    import symmetric_on_cpu
    from compile_overlap import peers

    if rank == RANKS:
        return None
    group = dist.new_group(list(range(RANKS)), backend="gloo", use_local_synchronization=True)
    os.environ.update(A2A_FFN_STRICT="1", A2A_FFN_CHUNKS="2", A2A_FFN_RECIPE="eager_exact", A2A_FFN_BIAS="add")
    os.environ.update(A2A_FFN_KERNEL_PLUGIN="compile_overlap", A2A_FFN_TRANSPORT="peers")
    os.environ.update(A2A_FFN_RANKS_PER_HOST=str(PER_HOST), A2A_FFN_OWN_FIRST="1")
    symmetric_on_cpu.install(folder)
    symmetric_on_cpu.aten_kernels()
    torch.manual_seed(5 + rank)
    ffn = ArchiveFFN(TOKENS, WIDTH, 2, group=group, size=RANKS, index=rank)
    x, upstream = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    expected, wanted = outputs_and_gradients(lambda t: ffn(t, overlap="none"), ffn, x, upstream)

    events, before = _watched(peers), len(passes.pass_log())
    got, grads = outputs_and_gradients(lambda t: ffn(t, overlap="kernel"), ffn, x, upstream)
    lowered = [report.matches for report in passes.pass_log()[before:] if report.name == "lower-to-peers"]

    def after_a_reset(t):
        output = ffn(t, overlap="kernel")
        compile_overlap.reset()
        return output

    _, late = outputs_and_gradients(after_a_reset, ffn, x, upstream)
    domain = rooms.domain_of(group, RANKS, x.device, PER_HOST)
    return torch.equal(got, expected), unequal(wanted, grads), unequal(wanted, late), lowered, domain, events


def _watched(peers):
    """What happens to rows from other hosts, and the parts of the first GEMM, in order."""
    events, start, wait = [], rooms.Away.start, rooms.Away.wait
    multiply = peers.multiply_into

    def on_start(self, key, rows):
        events.append(f"start {key}")
        start(self, key, rows)

    def on_wait(self, key):
        events.append(f"wait {key}")
        return wait(self, key)

    def on_multiply(product, *arguments):
        begin = product.storage_offset() // product.stride(1) // BATCH
        events.append(f"multiply {begin} to {begin + product.shape[1] // BATCH}")
        multiply(product, *arguments)

    rooms.Away.start, rooms.Away.wait, peers.multiply_into = on_start, on_wait, on_multiply
    return events


def test_a_part_of_the_world_on_two_hosts_computes_what_none_does(tmp_path):
    results = run_on_ranks(functools.partial(_two_levels, folder=str(tmp_path)), RANKS + 1, tmp_path)
    for rank, (equal, wrong, wrong_after_reset, lowered, domain, events) in enumerate(results[:RANKS]):
        assert equal and not wrong and not wrong_after_reset
        assert lowered == [7, 7]
        assert domain == ((0, 1) if rank < PER_HOST else (2, 3))
        near, far = ("0 to 2", "2 to 4") if rank < PER_HOST else ("2 to 4", "0 to 2")
        checked = events.index("start ('in', 0)")  # before that, the plan compared the parts with the whole
        first = [event for event in events[checked:] if event.startswith("multiply") or event.endswith("('in', 0)")]
        # Forward and backward, twice: my host's rows are multiplied while the others travel.
        assert first == 4 * ["start ('in', 0)", f"multiply {near}", "wait ('in', 0)", f"multiply {far}"]


@pytest.mark.parametrize("per_host", [3, 8])
def test_hosts_of_unequal_size_are_refused(per_host):
    shape = layout.Layout(P=4, B=2, T=16, D=32, H=64)
    settings = Settings(ranks_per_host=per_host)
    with pytest.raises(ValueError, match=f"A2A_FFN_RANKS_PER_HOST = {per_host}: must be a divisor .* P = 4"):
        problem = Problem(shape, torch.float32, False, "inductor", "add", 1, settings)
        transport.plan_for(None, 0, torch.device("cpu"), problem)


def test_hosts_are_told_apart_as_nccl_does(monkeypatch):
    own = rooms.host()
    monkeypatch.setattr(rooms.socket, "gethostname", lambda: "another")
    assert rooms.host() != own
    monkeypatch.setenv("NCCL_HOSTID", "node-a")
    assert rooms.host() == "node-a"
