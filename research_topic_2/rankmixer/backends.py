"""The named GEMM backends and dense modes, and what each needs.

``bmm`` (batched GEMM of the installed torch) with ``dense_v2`` runs everywhere. The optional names are those of the
wider RankMixer stack; their kernels are extensions of their own and are not part of this benchmark, so each one
reports what it would need and refuses to run.
"""

import importlib.util
from dataclasses import dataclass

import torch

DENSE_MODES = ("dense_v2",)
_OPTIONAL_MODULES = {"fused": ("triton",), "fp8": ("transformer_engine",), "cutedsl": ("cutlass",)}
GEMM_BACKENDS = ("bmm", *_OPTIONAL_MODULES)


@dataclass(frozen=True)
class BackendReport:
    """What a backend needs and has. ``missing`` is empty when every dependency was found."""

    name: str
    needs: tuple
    missing: tuple
    usable: bool

    def __str__(self):
        if self.usable:
            return f"{self.name}: usable"
        found = "dependencies found" if not self.missing else "missing " + ", ".join(self.missing)
        return f"{self.name}: not usable here ({found}; its kernels are not part of this benchmark)"


def report_backend(name):
    """Look for a backend's dependencies without importing them. Raises ValueError for an unknown name."""
    if name not in GEMM_BACKENDS:
        raise ValueError(f"gemm_backend={name!r}: allowed are {', '.join(GEMM_BACKENDS)}")
    if name == "bmm":
        return BackendReport(name, (), (), True)
    modules = _OPTIONAL_MODULES[name]
    missing = [f"module {module}" for module in modules if importlib.util.find_spec(module) is None]
    if not has_sm90():
        missing.append("an SM90 GPU")
    return BackendReport(name, (*modules, "SM90"), tuple(missing), False)


def require_backend(name):
    """Raise ValueError unless ``name`` can run here."""
    report = report_backend(name)
    if not report.usable:
        raise ValueError(f"gemm_backend={name!r}: {report}; use gemm_backend='bmm'")


def require_mode(argument, value):
    """Raise ValueError unless ``value`` is a supported forward or backward mode."""
    if value not in DENSE_MODES:
        raise ValueError(f"{argument}={value!r}: allowed is {', '.join(DENSE_MODES)}")


def has_sm90():
    """True when the current CUDA device is a Hopper GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def describe_backends():
    """One line per backend, for ``--list-backends``."""
    return "\n".join(str(report_backend(name)) for name in GEMM_BACKENDS)
