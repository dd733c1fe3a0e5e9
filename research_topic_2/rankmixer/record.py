"""The JSON records: what a run was, where it ran, and every rank's raw samples; `schema` says what each kind holds."""

import json
import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from rankmixer.runtime import nccl_version, shares_gpus
from rankmixer.schema import SCHEMA_VERSION, percentile, read, slowest_rank, validate  # noqa: F401  used through here


def environment(device):
    """Versions, device and commit of this run. The device of ranks that may share it begins with "shared"."""
    cuda = device.type == "cuda"
    shared = "shared " * (cuda and shares_gpus())
    return {
        "python": platform.python_version(), "torch": torch.__version__, "cuda_build": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())) if cuda else None,
        "triton": _version("triton"), "numpy": _version("numpy"),
        "device": shared + torch.cuda.get_device_name(device) if cuda else platform.machine() + " CPU",
        "git_commit": _git_commit(),
    }


def exchange_bytes(options, world_size):
    """Bytes that one dispatch or combine sends per rank, the local slice excluded."""
    itemsize = options.torch_dtype.itemsize
    payload = options.batch_size * options.tokens * options.dim * itemsize * (world_size - 1) // world_size
    return {"bytes_per_exchange": payload, "bytes_sent_per_exchange": payload * options.comm_scale,
            "exchanges": 4 if options.backward else 2}


def forward_flops(options):
    """Floating-point operations of one rank's two forward GEMMs (a multiply-add counts as two).

    Per rank, P*B rows meet L = T/P tokens: 2 * B*T * (D*2H + H*D) = 6*B*T*D*H.
    """
    hidden = options.dim * options.k * options.compute_scale
    return 6 * options.batch_size * options.tokens * options.dim * hidden


def forward_tflops(options, seconds):
    """Per-rank forward TFLOP/s, or None when the time includes a backward."""
    return None if options.backward else forward_flops(options) / seconds / 1e12


def tokens_per_second(options, world_size, seconds):
    """Tokens that the whole group finishes per second."""
    return world_size * options.batch_size * options.tokens / seconds


def peak_memory(device):
    """Peak bytes of this rank: allocated on the GPU, or resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(record, path):
    """Validate and write a record as JSON, making its folder. A device, pipe or link is written to, a file replaced whole."""
    path, text = Path(path), json.dumps(validate(record), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text)
        return
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit():
    """HEAD of the checkout. An exported tree without one is named by GIT_COMMIT, or by the file that an export fills in."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    exported = Path(__file__).resolve().parents[2] / "COMMIT"
    if exported.is_file() and not exported.read_text().startswith("$Format"):
        return exported.read_text().strip()
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"
