"""Two nodes on one machine: every node's torchrun side by side, their logs, and a table of what the records say.

`cross_cpu.py` puts each node into a network namespace, `cross_gpu.py` gives each its own GPUs. Both are emulations.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "research_topic_2"
PATIENCE_S = 40  # torchrun ends its ranks within 30 s of SIGTERM


def cross(*arguments):
    """The command that the assignment prints, on every node."""
    return ["bash", str(BENCHMARK / "scripts" / "run_prod_cross.sh"), *arguments]


def torchrun(*arguments):
    """torchrun as run_prod_cross.sh calls it, of something else than the benchmark; a node's variables fill it in."""
    launch = ('exec "$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$NPROC" --node-rank '
              '"$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"')  # fmt: skip
    return ["bash", "-c", launch, "torchrun", *map(str, arguments)]


def node_environment(rank, nodes, per_node, address, port):
    """The variables of a node of `per_node` ranks."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "NNODES": str(nodes), "NPROC": str(per_node), "NODE_RANK": str(rank), "MASTER_ADDR": address,
            "MASTER_PORT": str(port), "PYTHON": sys.executable, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}  # fmt: skip


def run_nodes(commands, environments, log, limit_s):
    """Run one command a node in `log`'s folder and keep their output in `log`, node after node.

    The first node that fails ends the others; an interrupt ends all of them. Returns the exit status, 124 if they take
    longer than `limit_s`.
    """
    logs = [log.with_suffix(f".node{node}") for node in range(len(commands))]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(each.open("w")) for each in logs]
        nodes = [
            subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT,
                             cwd=log.parent, start_new_session=True)
            for command, environment, file in zip(commands, environments, files)
        ]
        try:
            status = _first_failure(nodes, time.monotonic() + limit_s)
        finally:
            _end(nodes)
    texts = [f"== node {node}\n{each.read_text()}" for node, each in enumerate(logs)]
    log.write_text("\n".join(texts))
    for each in logs:
        each.unlink()
    return status


def _first_failure(nodes, deadline):
    while time.monotonic() < deadline:
        states = [node.poll() for node in nodes]
        if any(states) or None not in states:
            return next((abs(state) for state in states if state), 0)
        time.sleep(0.2)
    return 124


def _end(nodes):
    """torchrun passes SIGTERM on to its ranks, which have sessions of their own."""
    for node in nodes:
        if node.poll() is None:
            node.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for node in nodes:
        try:
            node.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def row(name, status, seconds, file):
    """One line of the table: the verdict, and what the record says where there is one."""
    verdict = {0: "passed", 124: "too late"}.get(status, f"failed ({status})")
    line = f"{name:<34}{verdict:<13}{seconds:>6.0f} s"
    if status or not file.exists():
        return line
    record = json.loads(file.read_text())
    if record["kind"] == "comparison":
        texts = [f"{mode} {values['median_s'] * 1e6:.0f} us" for mode, values in record["summary"].items()]
        checks = [mode for mode, outcome in record["checks"].items() if outcome["ran"] and "problem" not in outcome]
        return f"{line}   {', '.join(texts)}; checked: {', '.join(checks) or 'none'}"
    checked = "checked against none" if record["checks"].get("ran") else "no check"
    return f"{line}   {record['slowest_rank']['p50_s'] * 1e6:.0f} us, {record['pass']}, {checked}"
