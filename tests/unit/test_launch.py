"""Later launches go straight to what the JIT compiled, and only where the same code fits."""

import pytest
import torch

from compile_overlap import compat
from compile_overlap.kernels.launch import launch


class Kernel:
    """Stands in for a JIT function: counts what it compiles, and what is launched of that."""

    arg_names = ["x", "y", "n", "BLOCK", "FLAG"]

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        def again(*args):
            self.launched.append((grid, args))

        return run if len(grid) < 3 else again


@pytest.mark.parametrize("with_constants", [False, True])
def test_second_launch_skips_the_binder(monkeypatch, with_constants):
    monkeypatch.setattr(compat, "TRITON_LAUNCHES_WITH_CONSTANTS", with_constants)
    kernel, x, y = Kernel(), torch.zeros(32), torch.zeros(32)
    for _ in range(3):
        launch(kernel, (7,), x, y, 5, BLOCK=16, FLAG=True, num_warps=4)
    assert kernel.compiled == [((7,), (x, y, 5), {"BLOCK": 16, "FLAG": True, "num_warps": 4, "num_stages": 3})]
    assert kernel.launched == 2 * [((7, 1, 1), (x, y, 5, 16, True) if with_constants else (x, y, 5))]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(33)[1:]},  # another alignment
        {"x": torch.zeros(32, dtype=torch.float64)},
        {"n": 1},
        {"n": 5.0},
        {"BLOCK": 32},
        {"FLAG": False},
        {"num_warps": 8},
        {"num_stages": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_code_depends_on_is_compiled_for(change):
    kernel = Kernel()
    call = {"x": torch.zeros(32), "y": torch.zeros(32), "n": 5, "BLOCK": 16, "FLAG": True, "num_warps": 4, "num_stages": 3}
    for chosen in (call, call | change, call, call | change):
        arguments = dict(chosen)
        operands = [arguments.pop(name) for name in ("x", "y", "n")]
        launch(kernel, (1,), *operands, **arguments)
    assert len(kernel.compiled) == len(kernel.launched) == 2


def test_nothing_is_kept_of_an_interpreted_kernel():
    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *args, **options: self.launched.append(grid)

    kernel = Interpreted()
    for _ in range(2):
        launch(kernel, (3,), torch.zeros(4), BLOCK=16, num_warps=4)
    assert kernel.launched == [(3,), (3,)]
