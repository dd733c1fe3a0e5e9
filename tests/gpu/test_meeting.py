"""Kernels in which ranks meet: what all have stored is there when the wait ends. Ranks are streams of one GPU."""

import pytest
import torch

from compile_overlap.kernels import gemm_combine
from compile_overlap.kernels.collect import collect
from compile_overlap.kernels.meeting import Meeting
from compile_overlap.kernels.store_rows import store_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS, WIDTH = 4, 64


def _meetings(ranks):
    """The ranks' meetings, and their flags [ranks,ranks]."""
    flags = torch.zeros((ranks, ranks), dtype=torch.int32, device="cuda")
    places = torch.tensor([own.data_ptr() for own in flags], device="cuda")
    counts = [torch.zeros(2, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    return [Meeting(places, own, rank, 5000) for rank, own in enumerate(counts)], flags


def _buffers(ranks, *shape):
    buffers = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
    return buffers, torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batch, stored", [(3, TOKENS), (40, TOKENS), (700, 3)])
def test_what_all_have_stored_is_there(ranks, batch, stored):
    inboxes, inbox_addresses = _buffers(ranks, ranks * batch, TOKENS, WIDTH)
    results, result_addresses = _buffers(ranks, batch, ranks * TOKENS, WIDTH)
    (stored_meetings, flags), (combined_meetings, more_flags) = _meetings(ranks), _meetings(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    weights = torch.randn(ranks, TOKENS, WIDTH, WIDTH, device="cuda").bfloat16()
    # Kernels are compiled and loaded at their first launch, which must not be while one waits: then nobody waits.
    for each in (flags, more_flags):
        each.fill_(1)
    for call in range(-1, 20 if ranks > 1 else 2):
        if call == 0:
            for meeting in (*stored_meetings, *combined_meetings):
                meeting.counts.zero_()
            for each in (flags, more_flags):
                each.zero_()
        sources = torch.randn(ranks, batch, ranks, TOKENS, WIDTH, device="cuda").bfloat16()
        got = [None] * ranks
        torch.cuda.synchronize()
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                if call >= 0 and (call + rank) % 3 == 0:
                    torch.cuda._sleep(int(1e6))  # this rank is late
                store_rows(sources[rank], inbox_addresses, 0, TOKENS, stored, rank, stored_meetings[rank])
                rows = inboxes[rank].clone()
                gemm_combine.gemm_combine(
                    rows.transpose(0, 1).contiguous(), weights[rank], None, result_addresses, batch, ranks * TOKENS,
                    rank * TOKENS, gemm_combine.NO_BIAS, combined_meetings[rank],
                )  # fmt: skip
                got[rank] = rows, collect(results[rank], combined_meetings[rank])
        torch.cuda.synchronize()
        for rank, (rows, collected) in enumerate(got if call >= 0 else ()):
            expected = torch.cat([source[:, rank] for source in sources])
            assert torch.equal(rows[:, :stored], expected[:, :stored])
            for owner in range(ranks):
                left = got[owner][0][rank * batch : (rank + 1) * batch].transpose(0, 1)
                product = torch.bmm(left.float(), weights[owner].float()).transpose(0, 1)
                part = collected[:, owner * TOKENS : (owner + 1) * TOKENS].float()
                assert torch.allclose(part, product, rtol=2e-2, atol=2e-1)
            results[rank].fill_(float("nan"))
    assert all(meeting.counts.tolist() == [0, call + 1] for meeting in (*stored_meetings, *combined_meetings))
