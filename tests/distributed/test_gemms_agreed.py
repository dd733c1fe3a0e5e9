"""A GEMM is ours on all ranks or on none, whatever each of them measured."""

import torch
from ranks import run_on_ranks

from compile_overlap import gemms
from compile_overlap import group as groups
from compile_overlap.layout import Layout
from compile_overlap.schedule import BACKWARD, FORWARD

LAYOUT = Layout(2, 512, 8, 1280, 2560)


def _agreed(rank):
    """On CPU, with what each rank would measure on a GPU: rank 1 finds the forward's GEMM slower."""
    cpu, measured = torch.device("cpu"), []
    all_ranks = groups.all_ranks
    gemms.groups.all_ranks = lambda group, size, device, flag: all_ranks(group, size, cpu, flag)

    def beats(length, rows, inner, columns, transposed, dtype, device):
        measured.append((length, rows, inner, columns, transposed))
        if dtype == torch.float16 and rank == 1:
            raise RuntimeError("the kernel fails")
        return transposed or rank == 0

    gemms.chunk_gemm_triton.beats_cublas = beats
    cuda = torch.device("cuda")
    found = [
        gemms.agreed(None, LAYOUT, (1, 3), dtype, cuda, training, bias)
        for dtype, training, bias in (
            (torch.bfloat16, True, "add"),
            (torch.bfloat16, True, "add"),  # known by now
            (torch.bfloat16, False, "add"),
            (torch.bfloat16, True, "baddbmm"),
            (torch.float16, True, "add"),
        )
    ]
    assert gemms.agreed(None, Layout(2, 4, 8, 128, 256), (1, 3), torch.bfloat16, cuda, True, "add") == ()
    return found, measured[:4] if rank == 0 else None


def test_the_slowest_rank_decides(tmp_path):
    (found, measured), (other, _) = run_on_ranks(_agreed, 2, tmp_path)
    assert found == other == [(BACKWARD,), (BACKWARD,), (), (BACKWARD,), ()]
    assert {shape[1:] for shape in measured} == {(1024, 1280, 5120, False), (1024, 1280, 2560, True)}
    assert FORWARD not in sum(found, ())
