"""The cross-node commands on one machine without a GPU: two hosts as network namespaces, two ranks on each. As root.

    python scripts/cross_cpu.py OUT [--quick]

Each host has a name and an address of its own and reaches the other through one virtual network. On both run, at the
same time, the commands that the assignment prints, none, kernel and backward, with their checks, by gloo (`--device
cpu`); before them the topology and `preflight.py --target cluster`. OUT gets a log of each step with both nodes' output,
the benchmark's records, and `table.log`. `--quick` runs one kernel step with a backward check, as the tests do.

An emulation: both hosts share the cores, and the network is memory. The checks count, the times do not.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import cross_hosts
import netns

NODES, PER_NODE, PORT = 2, 2, 29500
SMALL = "--batch-size 4 --tokens 16 --dim 128 --k 2 --device cpu".split()
# Two rows: the check's are the whole batch then, and the layer is compiled once.
QUICK = ("--batch-size 2 --tokens 16 --dim 128 --k 2 --device cpu --overlap kernel --no-compile --backward "
         "--check-correctness approx --warmup 1 --num-tests 2 --no-l2-flush").split()  # fmt: skip
# name: what the printed command is given beside the shape
CASES = {
    "none": "--overlap none",
    "kernel": "--overlap kernel --check-correctness approx",
    "none_backward": "--overlap none --backward",
    "kernel_backward": "--overlap kernel --backward --check-correctness approx",
    "kernel_eager": "--overlap kernel --no-compile --backward --check-correctness bitwise --full-batch-check",
}


def steps(quick):
    """{name: command} in the order in which they run."""
    if quick:
        return {"quick": cross_hosts.cross(*QUICK, "--json", "quick.json")}
    before = {
        "topology": cross_hosts.torchrun("-m", "compile_overlap.topology"),
        "preflight": cross_hosts.torchrun(
            cross_hosts.BENCHMARK / "preflight.py", "--target", "cluster", "--device", "cpu", "--tokens", "16"
        ),
    }
    printed = {
        name: cross_hosts.cross(*SMALL, *flags.split(), "--json", f"{name}.json")
        for name, flags in CASES.items()
    }
    return before | printed


def run(out, quick, limit_s):
    """Run all steps in new namespaces; returns 0 where all passed."""
    out.mkdir(parents=True, exist_ok=True)
    netns.remove_stale()
    network, table, failed = netns.Network(NODES), [], False
    try:
        network.create()
        for index, (name, command) in enumerate(steps(quick).items()):
            environments = [
                cross_hosts.node_environment(node, NODES, PER_NODE, network.address(0), PORT + index)
                | {"GLOO_SOCKET_IFNAME": netns.INTERFACE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                | {"A2A_FFN_STRICT": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
                for node in range(NODES)
            ]
            commands = [netns.inside(each, f"host{node}", command) for node, each in enumerate(network.names)]
            begin = time.monotonic()
            status = cross_hosts.run_nodes(commands, environments, out / f"{name}.log", limit_s)
            failed = failed or status != 0
            table.append(cross_hosts.row(name, status, time.monotonic() - begin, out / f"{name}.json"))
            print(table[-1], flush=True)
    finally:
        network.remove()
    head = f"{NODES} network namespaces of {PER_NODE} gloo ranks each, an emulation of hosts; slowest-rank medians"
    (out / "table.log").write_text("\n".join([head, *table]) + "\n")
    return int(failed)


def main():
    parser = argparse.ArgumentParser(
        prog="cross_cpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for logs and records")
    parser.add_argument("--quick", action="store_true", help="one step: the kernel, forward and backward, checked")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each step (default: %(default)s)")
    options = parser.parse_args()
    problem = netns.missing()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        return run(options.out.resolve(), options.quick, options.limit)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))}: {error.stderr.strip()}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
