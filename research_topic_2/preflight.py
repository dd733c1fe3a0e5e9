"""Checks the environment before a benchmark run.

``--target cpu`` runs the complete block and its gradients on one rank in float32 and bfloat16 and compares them with
an independent computation; it covers local compute only. ``--target cuda`` checks versions, GPUs and driver, and runs
the public cases. ``--target cluster``, started on every node with torchrun as the job will be, compares the ranks'
software, sources, settings, GPUs, addresses and clocks (rankmixer/cluster.py).
"""

import argparse
import platform
import subprocess
import sys
from importlib import metadata

import torch

import public_check
from rankmixer import cluster
from rankmixer.block import RankMixerBlock
from rankmixer.checks import APPROX_LIMITS, frobenius_relative_error
from rankmixer.runtime import nccl_version

MINIMUM_DRIVER = (525, 60)  # the first branch whose minor-version compatibility covers CUDA 12.6
SHAPE = {"batch": 4, "tokens": 16, "dim": 128, "k": 2}


class Report:
    """Prints one line per check and remembers whether any failed."""

    def __init__(self):
        self.failed = False

    def check(self, name, ok, detail):
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)
        self.failed = self.failed or not ok


def plain_block(x, parameters, tokens):
    """The block in float32, token by token, from a {name: tensor} of its parameters. [B, T, D] -> [B, T, D]."""
    p = {name: tensor.float() for name, tensor in parameters.items()}
    heads = x.shape[-1] // tokens

    def norm(value, name):
        centred = value - value.mean(-1, keepdim=True)
        scale = torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return centred / scale * p[f"{name}.weight"] + p[f"{name}.bias"]

    mixed = torch.stack([x[:, :, t * heads:(t + 1) * heads].flatten(1) for t in range(tokens)], dim=1)
    y = norm(x + mixed, "norm1")
    rows = []
    for t in range(tokens):
        u, g = (y[:, t] @ p["ffn.w1"][t] + p["ffn.b1"][t]).chunk(2, dim=-1)
        gate = norm(g, "ffn.norm_gate")
        hidden = norm(u, "ffn.norm_x") * gate * torch.sigmoid(gate)
        rows.append(hidden @ p["ffn.wout"][t] + p["ffn.bout"][t])
    return norm(y + torch.stack(rows, dim=1), "norm2")


def check_block(report, dtype):
    """Run the block and its gradients at EP=1 and compare both with ``plain_block`` in float32."""
    torch.manual_seed(7101)
    block = RankMixerBlock(SHAPE["tokens"], SHAPE["dim"], SHAPE["k"], dtype=dtype)
    x = torch.randn(SHAPE["batch"], SHAPE["tokens"], SHAPE["dim"], dtype=dtype)
    upstream = torch.randn_like(x)
    actual = gradients_of(lambda leaf, _: block(leaf), x, dict(block.named_parameters()), upstream)
    exact = {name: value.detach().float().requires_grad_() for name, value in block.named_parameters()}
    expected = gradients_of(lambda leaf, named: plain_block(leaf, named, SHAPE["tokens"]), x.float(), exact,
                            upstream.float())
    limit = APPROX_LIMITS[dtype]
    name = str(dtype).removeprefix("torch.")
    shaped = all(actual[key].shape == expected[key].shape for key in expected)
    report.check(f"{name} shapes", actual.keys() == expected.keys() and shaped,
                 f"output {tuple(actual['output'].shape)}, {len(actual) - 1} gradients")
    report.check(f"{name} finite", all(bool(value.isfinite().all()) for value in actual.values()), "all values")
    errors = {key: frobenius_relative_error(actual[key], expected[key]) for key in expected}
    output = errors.pop("output")
    worst = max(errors, key=errors.get)
    report.check(f"{name} output", output <= limit, f"relative error {output:.2e}, at most {limit:g}")
    report.check(f"{name} gradients", errors[worst] <= limit,
                 f"largest relative error {errors[worst]:.2e} ({worst}), at most {limit:g}")


def gradients_of(function, x, named, upstream):
    """Return {"output", "inputs", parameter names: ...} of ``function(x, named)`` under ``upstream``."""
    leaf = x.clone().requires_grad_()
    output = function(leaf, named)
    grads = torch.autograd.grad(output, [leaf, *named.values()], upstream)
    return {"output": output.detach(), **dict(zip(["inputs", *named], grads))}


def check_versions(report, need_triton):
    """Report the interpreter and package versions."""
    report.check("python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.12 is the reference)")
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    report.check("torch", numbers >= (2, 6), f"{torch.__version__} (2.6.0 is the reference)")
    if need_triton:
        try:
            report.check("triton", True, f"{metadata.version('triton')} (3.2.0 is the reference)")
        except metadata.PackageNotFoundError:
            report.check("triton", False, "not installed")


def check_gpus(report):
    """Report CUDA, driver, GPUs and NCCL."""
    if not torch.cuda.is_available():
        report.check("cuda", False, f"no CUDA device (torch built for CUDA {torch.version.cuda})")
        return
    report.check("cuda", True, f"build {torch.version.cuda}, NCCL {'.'.join(map(str, nccl_version()))}")
    driver = driver_version()
    numbers = tuple(int(part) for part in driver.split(".")[:2]) if driver else ()
    report.check("driver", numbers >= MINIMUM_DRIVER, driver or "nvidia-smi gives no version")
    count = torch.cuda.device_count()
    report.check("gpus", count >= 2, f"{count} found, two are needed")
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        report.check(f"gpu {index}", capability[0] == 9,
                     f"{torch.cuda.get_device_name(index)}, SM{capability[0]}{capability[1]} (SM90 is needed)")


def driver_version():
    """The NVIDIA driver's version, or "" where nvidia-smi does not run."""
    try:
        result = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout else ""


def build_parser():
    """The preflight's command line."""
    parser = argparse.ArgumentParser(prog="preflight.py", description=__doc__)
    parser.add_argument("--target", choices=("cpu", "cuda", "cluster"), required=True)
    cluster_only = parser.add_argument_group("of a cluster's check")
    cluster_only.add_argument("--tokens", type=int, default=64, help="the job's T (default: %(default)s)")
    cluster_only.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    cluster_only.add_argument("--timeout", type=float, default=30, help="seconds to wait for ranks (default: %(default)s)")
    return parser


def main(arguments=None):
    """Returns 0 when every check passes, 1 otherwise, 2 for a cluster's check without its launcher."""
    options = build_parser().parse_args(arguments)
    if options.target == "cluster":
        return cluster.run(options)
    target = options.target
    report = Report()
    check_versions(report, need_triton=target == "cuda")
    if target == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            check_block(report, dtype)
        print("This covers local compute only. Exchanges run on CPU by two gloo processes (ENVIRONMENT.md); overlap, CUDA "
              "timing and cross-node runs need GPUs.")
    else:
        check_gpus(report)
        if not report.failed:
            failed = public_check.run_cases("cuda")
            report.check("public cases", not failed, ", ".join(failed) or f"{len(public_check.CASES)} passed")
    print(f"preflight {target}: {'FAIL' if report.failed else 'PASS'}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
