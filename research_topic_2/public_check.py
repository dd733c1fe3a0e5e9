"""The public cases on two ranks: sequential forward, kernel forward, kernel forward and backward.

Each case is a benchmark run of its own: (B, T, D, k) = (4, 16, 128, 2), seed 7101, bmm, no compilation, two warm-ups,
three measurements. The forward output is compared bit for bit in every checked case.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = ("--batch-size 4 --tokens 16 --dim 128 --k 2 --seed 7101 --gemm-backend bmm --no-compile "
          "--warmup 2 --num-tests 3").split()
CASES = {
    "sequential-forward": "--overlap none".split(),
    "kernel-forward-bitwise": "--overlap kernel --check-correctness bitwise".split(),
    "kernel-backward-approx": "--overlap kernel --backward --check-correctness approx".split(),
}


def run_cases(device, json_folder=None):
    """Run every case on two ranks, printing as it goes. Returns the names of the cases that failed."""
    failed = []
    for name, arguments in CASES.items():
        print(f"== {name}", flush=True)
        if run_case(arguments, device, json_folder and Path(json_folder) / f"{name}.json") != 0:
            failed.append(name)
        print(f"{name}: {'FAIL' if name in failed else 'PASS'}", flush=True)
    return failed


def run_case(arguments, device, json_file=None):
    """Launch one benchmark run on two ranks; returns its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(HERE / "benchmark.py"), *COMMON, *arguments, "--device", device]
    if json_file:
        command += ["--json", str(json_file)]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)), **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode


def main(arguments=None):
    """Returns 0 when every case passes, 1 otherwise, 2 when the device is not there."""
    parser = argparse.ArgumentParser(prog="public_check.py", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s (two GPUs)")
    parser.add_argument("--json", metavar="DIR", help="keep each case's record in this folder")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        import torch

        from rankmixer.runtime import shares_gpus

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        problem = f"device='cuda': {count} GPU(s) found, two are needed; --device cpu runs the cases with gloo"
        try:
            enough = count > 1 or count and shares_gpus()
        except ValueError as error:
            enough, problem = False, error
        if not enough:
            print(f"error: {problem}", file=sys.stderr)
            return 2
    failed = run_cases(options.device, options.json)
    print(f"public check: {'FAIL: ' + ', '.join(failed) if failed else 'PASS'} ({len(CASES)} cases)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
