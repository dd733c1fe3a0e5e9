"""Two nodes on the GPUs of one host: two torchruns, told apart as NCCL tells hosts apart, with the checks and timings.

    python scripts/cross_gpu.py OUT [--links sockets,shared-memory] [--per-node 1] [--dry-run]

Each node gets GPUs of its own. Over `sockets` the nodes are two hosts for NCCL and for this layer (`NCCL_HOSTID`): all that
passes between them goes through NCCL's network code over the loopback, some 6 GB/s. Over `shared-memory` they are one host
whose GPUs do not reach each other (`NCCL_P2P_DISABLE=1`): 23 GB/s, about one 200 Gb/s card a GPU. With two GPUs or more a
node, `sockets` is also the two-level exchange of `A2A_FFN_TRANSPORT=peers`.

For each link: the commands that the assignment prints, with their checks, and the default workload, none, with-sm and
kernel in one comparison, forward and backward, compiled and eager. `sm-free` is left out: it needs peer access, which
nodes that see only their own GPUs have not got. OUT gets table.log and results.tar.gz. Emulations both: one host, its memory.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import cross_hosts

NODES, PORT = 2, 29500
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "4"}
LINKS = {"sockets": SOCKETS, "shared-memory": {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}}
SMALL = "--batch-size 4 --tokens 16 --dim 128 --k 2".split()
PRINTED = {
    "small_none": "--overlap none",
    "small_kernel": "--overlap kernel --check-correctness approx",
    "small_backward": "--overlap kernel --backward --check-correctness approx",
}
COMPARED = {
    "default": "",
    "default_backward": "--backward",
    "default_eager": "--no-compile",
    "default_eager_backward": "--no-compile --backward",
}
COMMON = "--warmup 3 --num-tests 12 --rounds 3 --check-correctness approx".split()


def steps(link, per_node):
    """{name: command} of one link, what is checked first."""
    two_levels = link == "sockets" and per_node > 1
    modes = "none,with-sm,kernel"
    if two_levels:
        modes += ",kernel:peers,kernel:TRANSPORT=peers+OWN_FIRST=1"
    commands = {"topology": cross_hosts.torchrun("-m", "compile_overlap.topology")}
    for name, flags in PRINTED.items():
        commands[name] = cross_hosts.cross(*SMALL, *flags.split(), "--json", f"{link}_{name}.json")
    for name, flags in COMPARED.items():
        compare = cross_hosts.BENCHMARK / "compare.py"
        commands[name] = cross_hosts.torchrun(compare, "--modes", modes, *COMMON, *flags.split(), "--json", f"{link}_{name}.json")
    return {f"{link}_{name}": command for name, command in commands.items()}


def environments(link, per_node, port):
    """The variables of both nodes."""
    found = []
    for node in range(NODES):
        gpus = ",".join(str(node * per_node + index) for index in range(per_node))
        own = cross_hosts.node_environment(node, NODES, per_node, "127.0.0.1", port) | LINKS[link]
        own |= {"CUDA_VISIBLE_DEVICES": gpus, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        found.append(own | ({"NCCL_HOSTID": f"node{node}"} if link == "sockets" else {}))
    return found


def run(links, per_node, work, out, budget_s):
    """Run the steps of all links, and pack what they leave after each; returns 0 where all passed."""
    begin, table, failed = time.monotonic(), [], False
    named = [(link, *step) for link in links for step in steps(link, per_node).items()]
    for index, (link, name, command) in enumerate(named):
        left, since = budget_s - (time.monotonic() - begin), time.monotonic()
        if left < 30:
            table.append(f"{name:<34}skipped: {left:.0f} s are left of {budget_s:g}")
            status = 1
        else:
            nodes = environments(link, per_node, PORT + index)
            status = cross_hosts.run_nodes([command] * NODES, nodes, work / f"{name}.log", min(left, 240))
            table.append(cross_hosts.row(name, status, time.monotonic() - since, work / f"{name}.json"))
        failed = failed or status != 0
        print(table[-1], flush=True)
        head = f"{NODES} torchrun nodes of {per_node} GPU(s) on one host, an emulation of hosts; slowest-rank medians"
        (work / "table.log").write_text("\n".join([head, *table]) + "\n")
        shutil.copy(work / "table.log", out)
        shutil.make_archive(str(out / "results"), "gztar", work)
    return int(failed)


def main():
    parser = argparse.ArgumentParser(
        prog="cross_gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for table.log and results.tar.gz")
    parser.add_argument("--links", default="sockets,shared-memory", help="default: %(default)s")
    parser.add_argument("--per-node", type=int, default=1, help="GPUs of a node (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=560, help="seconds in all (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands with what is set for each node")
    options = parser.parse_args()
    links = options.links.split(",")
    if not set(links) <= set(LINKS) or options.per_node < 1:
        parser.error(f"links={options.links!r}: allowed are {', '.join(LINKS)}; per_node={options.per_node}: at least 1")
    if options.dry_run:
        for link in links:
            for name, command in steps(link, options.per_node).items():
                for node in environments(link, options.per_node, PORT):
                    own = {key: value for key, value in node.items() if os.environ.get(key) != value}
                    words = [f"{key}={value}" for key, value in own.items()] + command
                    print(f"{name}: {shlex.join(words)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        return run(links, options.per_node, Path(work), options.out, options.budget)


if __name__ == "__main__":
    sys.exit(main())
