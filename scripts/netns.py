"""Ranks, or hosts of several ranks, in network namespaces, on one link that `tc` can shape. Needs root, `ip` and `tc`.

For netns_overlap.py and cross_cpu.py.

    rank 0: link0 --- port0 \\                         / bridge
    rank 1: link0 --- port1 -- bus | trunk0 --- trunk1    that sends every frame back
    ...                     /  (tbf on trunk0)

All ranks share the link in both directions: the bridge `bus` lets its ports reach the trunk only, whose other end sends
every frame back. So an exchange takes the same time whether gloo sends both ways at once or, where one rank comes later
than the other, one way after the other (a rank's permission to send queues behind that rank's own data).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PREFIX = "a2aovl-"
USERS = (b"netns_overlap.py", b"cross_cpu.py")
INTERFACE = "link0"
MTU = 9000
# The largest receive window: what a connection can have in the link's queue.
WINDOW_BYTES = 256 << 10


def missing():
    """What this needs and does not have, or None."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"no {' and no '.join(absent)} (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo"
    return None


def ip(*words):
    """Run `ip` and return its output. Raises CalledProcessError with its message."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def namespaces():
    """The names of the namespaces that runs of this script made."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(PREFIX)]


def remove_namespace(name):
    """Remove a namespace of ours with the processes that are left in it; its interfaces go with it."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", name)


def remove_stale():
    """Remove what a run left that was killed: its process is gone, or another program has its number."""
    for name in namespaces():
        command = Path("/proc", name.removeprefix(PREFIX).split("-")[0], "cmdline")
        if not command.exists() or not any(user in command.read_bytes() for user in USERS):
            print(f"removing {name}, which an earlier run left", flush=True)
            remove_namespace(name)


def inside(name, hostname, command):
    """The command as it runs in a namespace, on a host of this name."""
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hostname, *command]


class Network:
    """A namespace for each rank, or host, with an address on one network, and two for the link between them."""

    def __init__(self, ranks):
        self.names = [f"{PREFIX}{os.getpid()}-{rank}" for rank in range(ranks)]
        self.bus, self.mirror = (f"{PREFIX}{os.getpid()}-{part}" for part in ("bus", "mirror"))

    def address(self, rank):
        return f"10.203.0.{rank + 1}"

    def create(self):
        """Raises CalledProcessError where the kernel refuses; `remove` takes away what was made until then."""
        for name in (self.bus, self.mirror, *self.names):
            ip("netns", "add", name)
        self._veth("trunk0", self.bus, "trunk1", self.mirror)
        for name in (self.bus, self.mirror):
            ip("-n", name, "link", "add", "bridge0", "mtu", str(MTU), "type", "bridge")
            ip("-n", name, "link", "set", "bridge0", "up")
        self._port(self.bus, "trunk0", "learning", "off")
        self._port(self.mirror, "trunk1", "learning", "off", "hairpin", "on")
        for rank, name in enumerate(self.names):
            self._veth(f"port{rank}", self.bus, INTERFACE, name)
            self._port(self.bus, f"port{rank}", "learning", "off", "isolated", "on")
            ip("-n", name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")

    @staticmethod
    def _veth(first, first_namespace, second, second_namespace):
        ip("link", "add", first, "mtu", str(MTU), "netns", first_namespace, "type", "veth",
           "peer", "name", second, "mtu", str(MTU), "netns", second_namespace)

    @staticmethod
    def _port(namespace, name, *options):
        ip("-n", namespace, "link", "set", name, "master", "bridge0")
        ip("-n", namespace, "link", "set", name, "type", "bridge_slave", *options)
        ip("-n", namespace, "link", "set", name, "up")

    def remove(self):
        """Remove all of it; a second interrupt does not stop this."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        present = namespaces()
        for name in (*self.names, self.bus, self.mirror):
            if name in present:
                remove_namespace(name)


def launch(ranks, environment, script, *arguments):
    """Run the script once in each of `ranks` new namespaces, with `--worker BUS`; returns the exit status.

    The first worker that fails ends the others. The namespaces are removed in every case.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    remove_stale()
    network, workers = Network(ranks), []
    try:
        network.create()
        common = {**os.environ, **environment, "WORLD_SIZE": str(ranks), "MASTER_ADDR": network.address(0),
                  "MASTER_PORT": "29411", "GLOO_SOCKET_IFNAME": INTERFACE}
        for rank, name in enumerate(network.names):
            command = ["ip", "netns", "exec", name, sys.executable, script, "--worker", network.bus, *arguments]
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=own, start_new_session=True))
        while True:
            states = [worker.poll() for worker in workers]
            if any(states) or None not in states:
                return next((abs(state) for state in states if state), 0)
            time.sleep(0.2)
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        network.remove()


def tune_tcp():
    """Inside a rank's namespace: a small receive window and a plain congestion control keep the link's queue short.

    bbr, where it is the default, would pace by its own estimate of the link and drain it every ten seconds.
    """
    folder = Path("/proc/sys/net/ipv4")
    (folder / "tcp_congestion_control").write_text("reno")
    (folder / "tcp_rmem").write_text(f"4096 {WINDOW_BYTES // 2} {WINDOW_BYTES}")


class Link:
    """The rate of the link, as a token bucket; rank 0 sets it."""

    def __init__(self, runtime, bus, delay_us):
        self.runtime, self.bus, self.rate = runtime, bus, None
        self.place, problem = ("root",), ""
        if delay_us and runtime.is_main:
            problem = self._tc("add", "root", "handle", "1:", "netem", "delay", f"{delay_us}us", "limit", "100000")
            runtime.print(f"no delay: the kernel has no netem ({problem})" if problem else f"delay {delay_us} us")
        if delay_us and not problem:
            self.place = ("parent", "1:1", "handle", "10:")

    def shape(self, bytes_per_s):
        """Raises RuntimeError where tbf is refused."""
        self.rate, self.burst = bytes_per_s, max(131072, int(bytes_per_s * 2e-3))
        limit = 2 * WINDOW_BYTES * self.runtime.world_size**2
        rate = ("rate", f"{int(bytes_per_s * 8)}bit", "burst", str(self.burst), "limit", str(limit))
        problem = self._tc("replace", *self.place, "tbf", *rate) if self.runtime.is_main else ""
        if problem:
            raise RuntimeError(f"tc cannot shape the link with tbf: {problem}")
        self.runtime.barrier()

    def _tc(self, verb, *words):
        command = ["tc", "-n", self.bus, "qdisc", verb, "dev", "trunk0", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return (done.stderr.strip().splitlines() or ["failed"])[0] if done.returncode else ""
