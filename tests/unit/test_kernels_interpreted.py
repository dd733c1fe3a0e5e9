"""GEMMs and stores into other ranks' buffers, run by Triton's interpreter: what they write, and what they do not.

In a process of its own: whether kernels are interpreted is decided when Triton is imported.
"""

import os
import subprocess
import sys

import pytest
import torch

UNTOUCHED = 7.0


def _buffers(ranks, *shape):
    buffers = [torch.full(shape, UNTOUCHED, dtype=torch.float16) for _ in range(ranks)]
    return buffers, torch.tensor([buffer.data_ptr() for buffer in buffers])


def store_rows():
    from compile_overlap.kernels import store_rows as kernel
    from compile_overlap.kernels.meeting import Meeting

    kernel.sm_count = lambda device: 1

    for B, P, L, D in ((3, 2, 6, 40), (1, 4, 3, 1300), (2, 8, 4, 5)):
        for first, length, stored in ((0, L, L), (1, L - 1, L - 1), (0, 1, 1), (0, L, L - 1), (1, L - 1, 1)):
            sources = [torch.randn(B, P, L, D).half() for _ in range(P)]
            inboxes, addresses = _buffers(P, P * B * L * D)
            for rank, source in enumerate(sources):
                flags = torch.zeros(1, dtype=torch.int32)
                meeting = Meeting(torch.tensor([flags.data_ptr()]), torch.tensor([0, 7], dtype=torch.int32), 0, 1000)
                kernel.store_rows(source, addresses, first, length, stored, rank, meeting)
                assert flags.tolist() == [8] and meeting.counts.tolist() == [0, 8]
            begin, end = P * B * first * D, P * B * (first + length) * D
            for owner, inbox in enumerate(inboxes):
                rows = torch.cat([source[:, owner, first : first + length] for source in sources])
                theirs = torch.arange(P * B) // B != owner
                rows[theirs, stored:] = UNTOUCHED
                assert torch.equal(inbox[begin:end], rows.flatten())
                assert (inbox[:begin] == UNTOUCHED).all() and (inbox[end:] == UNTOUCHED).all()


def collect():
    from compile_overlap.kernels import collect as kernel
    from compile_overlap.kernels.meeting import Meeting

    kernel._SMALLEST, kernel._LARGEST, kernel._PROGRAMS = 16, 32, 3
    flags = torch.tensor([3, 3, 4], dtype=torch.int32)
    meeting = Meeting(torch.tensor([0, flags.data_ptr(), 0]), torch.tensor([0, 3], dtype=torch.int32), 1, 1000)
    for count in (1, 16, 47, 200):
        results = torch.randn(count).half()
        assert torch.equal(kernel.collect(results, meeting), results)


def gemm_combine():
    from compile_overlap.kernels import gemm_combine as kernel

    kernel.sm_count = lambda device: 3
    kernel.TensorDescriptor = None
    for tokens, ranks, batch, inner, columns in ((2, 4, 33, 72, 100), (1, 2, 3, 64, 130)):
        for transposed in (False, True):
            for form in (kernel.NO_BIAS, kernel.ADD, kernel.BADDBMM):
                left = torch.randn(tokens, ranks * batch, inner).half()
                right = torch.randn(tokens, columns, inner).half().transpose(1, 2)
                right = right if transposed else right.contiguous()
                bias = torch.randn(tokens, columns).half()
                outs, addresses = _buffers(ranks, batch, tokens + 3, columns)
                given = bias if form else None
                kernel.gemm_combine(left, right, given, addresses, batch, tokens + 3, 2, form)
                expected = torch.bmm(left.float(), right.float()) + (bias.float().unsqueeze(1) if form else 0.0)
                for out, rows in zip(outs, expected.split(batch, dim=1)):
                    assert torch.allclose(out[:, 2 : 2 + tokens].float(), rows.transpose(0, 1), rtol=4e-3, atol=4e-2)
                    assert (out[:, :2] == UNTOUCHED).all() and (out[:, 2 + tokens :] == UNTOUCHED).all()


def chunk_bmm_triton():
    from compile_overlap.kernels import chunk_gemm_triton as kernel

    kernel.sm_count = lambda device: 3
    for tokens, rows, inner, columns in ((2, 33, 72, 100), (2, 128, 64, 256), (1, 3, 64, 130)):
        for transposed in (False, True):
            left = torch.randn(rows, tokens, inner).half().transpose(0, 1)
            right = torch.randn(tokens, columns, inner).half().transpose(1, 2)
            right = right if transposed else right.contiguous()
            expected = torch.bmm(left.float(), right.float())
            padded = torch.zeros(rows, tokens, inner + 3).half()  # rows that begin anywhere
            padded[..., :inner] = left.transpose(0, 1)
            wide = torch.zeros(tokens, right.shape[1], columns + 5).half()
            wide[..., :columns] = right
            left, right = (padded[..., :inner].transpose(0, 1), wide[..., :columns]) if rows == 33 else (left, right)
            assert torch.allclose(kernel.chunk_bmm_triton(left, right).float(), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("kernel", [store_rows, collect, gemm_combine, chunk_bmm_triton], ids=lambda kernel: kernel.__name__)
def test_every_value_reaches_its_place(kernel):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, kernel.__name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
