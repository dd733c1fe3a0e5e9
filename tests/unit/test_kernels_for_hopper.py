"""Our kernels compile for an H200, without spills; no GPU is needed for that."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from compile_overlap.kernels import launch as launching

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

L, ROWS, D, H = 32, 1024, 1280, 7680
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
OLD = triton.__version__.startswith("3.2.")


def _source(launch, tensors):
    """What `launch(*tensors)` would have compiled."""
    names = launch.kernel.arg_names
    arguments = dict(zip(names, (*tensors, *launch.numbers)))
    signature, aligned = {}, []
    for index, (name, value) in enumerate(arguments.items()):
        tensor = isinstance(value, torch.Tensor)
        wide = isinstance(value, int) and value >= 1 << 31
        signature[name] = TYPES[value.dtype] if tensor else "fp32" if isinstance(value, float) else "i64" if wide else "i32"
        if tensor or isinstance(value, int) and value % 16 == 0:
            aligned.append(index)
    if OLD:
        from triton.backends.compiler import AttrsDescriptor

        attributes = AttrsDescriptor()
        attributes.property_values.update({"tt.divisibility": 16, "tt.equal_to": 1})
        attributes.arg_properties.update({"tt.divisibility": aligned, "tt.equal_to": []})
        return ASTSource(launch.kernel, signature, launch.constants, attributes)
    signature.update(dict.fromkeys(launch.constants, "constexpr"))
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    return ASTSource(launch.kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned})


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """{kernel: its use of registers, stack and so on}, filled as kernels are launched."""
    found = {}

    def compile_only(self, *tensors):
        options = {key: value for key, value in self.options.items() if value is not None}
        kernel = triton.compile(_source(self, tensors), target=GPUTarget("cuda", 90, 32), options=options)
        path = tmp_path / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        found[self.kernel.__name__] = int(re.search(r"STACK:(\d+)", usage)[1])

    monkeypatch.setattr(launching.Launch, "__call__", compile_only)
    from compile_overlap.kernels import chunk_gemm_triton, gemm_combine, inductor_gated_norm, store_rows

    for module in (chunk_gemm_triton, gemm_combine, store_rows):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    monkeypatch.setattr(gemm_combine, "TensorDescriptor", None)
    monkeypatch.setattr(inductor_gated_norm, "_shares_are_halves", lambda *_: True)
    yield found
    for module in (chunk_gemm_triton, gemm_combine, store_rows, inductor_gated_norm):
        for cached in ("_launch", "_prepared"):
            if hasattr(module, cached):
                getattr(module, cached).cache_clear()


def _empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def _meeting(monkeypatch):
    from compile_overlap.kernels.meeting import Meeting

    monkeypatch.setattr(Meeting, "timed", True)  # as on a GPU
    return Meeting(_empty(2, dtype=torch.int64), _empty(2, dtype=torch.int32), 1, 1_800_000)


def test_what_ranks_meet_in(compiled, monkeypatch):
    from compile_overlap.kernels import gemm_combine
    from compile_overlap.kernels.collect import collect
    from compile_overlap.kernels.store_rows import store_rows

    meeting, addresses = _meeting(monkeypatch), _empty(2, dtype=torch.int64)
    store_rows(_empty(16, 2, L, D), addresses, 0, L, 3, 0, meeting)
    collect(_empty(ROWS, L, D), meeting)
    gemm_combine.gemm_combine(
        _empty(2, ROWS, H), _empty(2, H, D), _empty(2, D), addresses, ROWS // 2, 2 * L, L, gemm_combine.ADD, meeting
    )  # fmt: skip
    assert compiled == {"_store_rows": 0, "_collect": 0, "_gemm_combine": 0}


@pytest.mark.parametrize("rounded", [True, False])
def test_gated_norms(compiled, rounded):
    from compile_overlap.kernels import exact_gated_norm, gated_norm_grad, inductor_gated_norm
    from compile_overlap.operators import direct

    z, bias, norms = _empty(2, 8, 2 * H), _empty(2, 2 * H), [_empty(H) for _ in range(4)]
    exact_gated_norm._launch.cache_clear()
    exact_gated_norm.forward(z, bias, *norms, 1e-5, 1e-5)
    direct.inductor_gated_norm(z, bias, *norms, 1e-5, 1e-5, rounded, *inductor_gated_norm.ORDERS[0])
    statistics = [_empty(2, 8, 1, dtype=torch.float32) for _ in range(4)]
    gated_norm_grad._launches.cache_clear()
    direct.gated_norm_grad(_empty(2, 8, H), z, bias, *norms, *statistics, rounded)
    assert compiled == {"_exact_gated_norm": 0, "_inductor_gated_norm": 0, "_row_sums": 0, "_columns": 0}


def test_the_own_first_gemm(compiled):
    from compile_overlap.kernels import chunk_gemm_triton

    chunk_gemm_triton.bmm_into(_empty(ROWS, 2, D).transpose(0, 1), _empty(2, D, 2 * H), _empty(2, ROWS, 2 * H))
    assert list(compiled.values()) == [0]
