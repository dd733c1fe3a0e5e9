"""Later launches go straight to what the JIT compiled, and only where the same code fits."""

import pytest
import torch

from compile_overlap import compat
from compile_overlap.kernels.launch import Launch

STREAM = 77


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(compat, "current_raw_stream", lambda: STREAM)
    monkeypatch.setattr(compat, "TRITON_VERSION", "3.2.0")


class Kernel:
    """Stands in for a JIT function: counts what it compiles, and what is launched of that."""

    arg_names = ["x", "y", "n", "a", "BLOCK", "FLAG"]

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        return run

    function, packed_metadata = "function", "metadata"

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (function, metadata, launch_metadata, enter, leave) == ("function", "metadata", None, None, None)
        self.launched.append(((x, y, z), args, stream))


@pytest.mark.parametrize("with_constants", [False, True])
def test_second_launch_skips_the_binder(monkeypatch, with_constants):
    monkeypatch.setattr(compat, "TRITON_LAUNCHES_WITH_CONSTANTS", with_constants)
    kernel, x, y = Kernel(), torch.zeros(32), torch.zeros(32)
    rest = (5, 0.5, 16, True) if with_constants else (5, 0.5)
    launch = Launch(kernel, (7,), (5, 0.5), FLAG=True, BLOCK=16, num_warps=4)
    for _ in range(3):
        launch(x, y)
    assert kernel.compiled == [((7,), (x, y, 5, 0.5), {"BLOCK": 16, "FLAG": True, "num_warps": 4, "num_stages": 3})]
    assert kernel.launched == 2 * [((7, 1, 1), (x.data_ptr(), y.data_ptr(), *rest), STREAM)]


def test_another_version_launches_as_triton_does(monkeypatch):
    monkeypatch.setattr(compat, "TRITON_VERSION", "9.9.0")
    kernel, x = Kernel(), torch.zeros(32)
    launch = Launch(kernel, (7,), (), num_warps=4)
    for _ in range(2):
        launch(x)
    assert not kernel.launched
    assert kernel.compiled[1:] == [((7, 1, 1), (x.data_ptr(),), {"stream": STREAM})]


@pytest.mark.parametrize("scratch", [0, 128])
def test_a_kernel_that_needs_no_scratch_memory_is_launched_without_asking_for_it(monkeypatch, scratch):
    class Launcher:
        launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, True, 0, scratch
        called = []

        def __call__(self, *args):
            self.called.append(("asking", args))

        def launch(self, *args):
            self.called.append(("at once", args))

    monkeypatch.setattr(compat, "TRITON_VERSION", "3.6.0")
    kernel, x = Kernel(), torch.zeros(32)
    kernel.run = Launcher()
    launch = Launch(kernel, (7,), (), num_warps=4)
    for _ in range(2):
        launch(x)
    rest = "metadata", None, None, None, x.data_ptr()
    at_once = "at once", (7, 1, 1, STREAM, "function", False, True, None, None, *rest)
    assert Launcher.called == [("asking", (7, 1, 1, STREAM, "function", *rest)) if scratch else at_once]


def test_another_alignment_is_compiled_for():
    kernel, aligned, shifted = Kernel(), torch.zeros(32), torch.zeros(33)[1:]
    launch = Launch(kernel, (1, 2), (), num_warps=4)
    for tensor in (aligned, shifted, aligned, shifted):
        launch(tensor)
    assert [args[0] is aligned for _, args, _ in kernel.compiled] == [True, False]
    assert [grid for grid, _, _ in kernel.launched] == 2 * [(1, 2, 1)]


def test_descriptors_are_passed_on():
    kernel, descriptor = Kernel(), object()
    launch = Launch(kernel, (1,), (), num_warps=4, descriptors=1)
    for _ in range(2):
        launch(descriptor, torch.zeros(32))
    assert kernel.launched[0][1][0] is descriptor


def test_nothing_is_kept_of_an_interpreted_kernel():
    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *args, **options: self.launched.append(grid)

    kernel = Interpreted()
    launch = Launch(kernel, (3,), (), BLOCK=16, num_warps=4)
    for _ in range(2):
        launch(torch.zeros(4))
    assert kernel.launched == [(3,), (3,)]
