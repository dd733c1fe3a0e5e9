"""Which tile the GEMM that stores to its peers takes; the kernel itself is tested on a GPU."""

import pytest
import torch

from compile_overlap.kernels.gemm_combine import POINTER_TILES, TILES, laid_out, tile_for


@pytest.mark.parametrize(
    "tokens, rows, tile",
    [(32, 1024, TILES[0]), (16, 1024, TILES[0]), (8, 1024, TILES[2]), (4, 64, TILES[3]), (1, 1, TILES[3])],
)
def test_the_tile_with_the_cheapest_waves_is_taken(tokens, rows, tile):
    assert tile_for(tokens, rows, 1280, 132) == tile


def test_loads_by_pointer_have_tiles_of_their_own():
    assert tile_for(32, 1024, 1280, 132, POINTER_TILES) == POINTER_TILES[0]


def test_what_a_kernel_cannot_read_is_copied():
    whole = torch.randn(2, 16, 24)
    assert laid_out(whole) == (whole, False)
    turned = torch.randn(2, 24, 16).transpose(1, 2)
    assert laid_out(turned) == (turned, True)
    for odd in (torch.randn(2, 16, 27)[..., :24], torch.randn(2, 24, 18)[..., :16].transpose(1, 2), whole.expand(4, 2, 16, 24)[0]):
        right, transposed = laid_out(odd)
        assert torch.equal(right, odd) and (right.is_contiguous() or right is odd) and not transposed
    single = torch.randn(2, 24, 1)
    assert laid_out(single)[0] is single
