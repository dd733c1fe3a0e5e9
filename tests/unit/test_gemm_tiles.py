"""Which tile the GEMM that stores to its peers takes; the kernel itself is tested on a GPU."""

import pytest

from compile_overlap.kernels.gemm_combine import POINTER_TILES, TILES, tile_for


@pytest.mark.parametrize(
    "tokens, rows, tile",
    [(32, 1024, TILES[0]), (16, 1024, TILES[0]), (8, 1024, TILES[1]), (4, 64, TILES[2]), (1, 1, TILES[2])],
)
def test_the_tile_with_the_cheapest_waves_is_taken(tokens, rows, tile):
    assert tile_for(tokens, rows, 1280, 132) == tile


def test_loads_by_pointer_have_tiles_of_their_own():
    assert tile_for(32, 1024, 1280, 132, POINTER_TILES) == POINTER_TILES[0]
