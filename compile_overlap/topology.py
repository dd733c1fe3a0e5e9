"""Hosts, GPUs, peer access and networks as they are found, by every rank.

    python -m compile_overlap.topology [--json FILE]                     of this host
    torchrun ... -m compile_overlap.topology [--json FILE]               of all ranks' hosts, printed by rank 0

Nothing is exchanged but text, by the launcher's store: it works where the ranks could not form a group. A rank that says
nothing within `--timeout` seconds is named, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from . import rooms
from .config import Settings, require_divisor

_NETWORKS, _CARDS, _PCI = Path("/sys/class/net"), Path("/sys/class/infiniband"), Path("/sys/bus/pci/devices")
_IPV4_OF = 0x8915  # SIOCGIFADDR
MOST_SECONDS = 86400


def found(rank: int = 0, local_rank: int = 0) -> dict[str, Any]:
    """What this process finds on its host; JSON's types only."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank) if local_rank < count else torch.device("cpu")
    driver, buses = _driver()
    return {
        "rank": rank,
        "local_rank": local_rank,
        "host": rooms.host(),
        "hostname": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "driver": driver,
        "gpus": [_gpu(index, count, buses) for index in range(count)],
        "peers_obstacle": rooms.own_obstacle(device, torch.bfloat16),
        "networks": networks(),
        "cards": _cards(),
        "master": _towards(os.environ.get("MASTER_ADDR", "")),
    }


def _driver() -> tuple[str | None, dict[str, str]]:
    """(version of NVIDIA's driver, {a GPU's UUID: its PCI address}), as nvidia-smi has them."""
    query = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, {}
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    rows = [row for row in rows if len(row) == 3]  # without a GPU it says so in a sentence
    return (rows[0][2] if rows else None), {uuid.removeprefix("GPU-"): bus.lower()[-12:] for uuid, bus, _ in rows}


def _gpu(index: int, count: int, buses: dict[str, str]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    bus = buses.get(str(properties.uuid))
    return {
        "index": index,
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_gib": round(properties.total_memory / 2**30),
        "numa": _number(_PCI / bus / "numa_node") if bus else None,
        "peers": [i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i)],
    }


def networks() -> list[dict[str, Any]]:
    """The network interfaces with their addresses; those that are up first."""
    names = sorted(path.name for path in _NETWORKS.iterdir()) if _NETWORKS.exists() else []
    interfaces = [
        {
            "name": name,
            "state": _text(_NETWORKS / name / "operstate"),
            "speed_mbit": _number(_NETWORKS / name / "speed"),
            "numa": _number(_NETWORKS / name / "device" / "numa_node"),
            "addresses": _addresses(name),
        }
        for name in names
    ]
    return sorted(interfaces, key=lambda each: (each["state"] == "down", not each["addresses"], each["name"]))


def _addresses(name: str) -> list[str]:
    own = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _IPV4_OF, struct.pack("256s", name.encode()[:15]))
        own.append(socket.inet_ntoa(answer[20:24]))
    for line in (_text(Path("/proc/net/if_inet6")) or "").splitlines():
        digits, *_, interface = line.split()
        if interface == name:
            own.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return own


def _cards() -> list[dict[str, Any]]:
    """InfiniBand and RoCE cards, by port."""
    return [
        {
            "name": f"{port.parents[1].name}:{port.name}",
            "state": (_text(port / "state") or "").partition(": ")[2],
            "rate": _text(port / "rate"),
            "layer": _text(port / "link_layer"),
            "networks": sorted(each.name for each in (port.parents[1] / "device" / "net").glob("*")),
            "numa": _number(port.parents[1] / "device" / "numa_node"),
        }
        for port in sorted(_CARDS.glob("*/ports/*"))
    ]


def _towards(address: str) -> dict[str, str] | None:
    """The interface and the own address by which this host reaches `address`; nothing is sent."""
    if not address:
        return None
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        return {"master": address, "error": str(error)}
    interface = next((each["name"] for each in networks() if own in each["addresses"]), "")
    return {"master": address, "interface": interface, "address": own}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # an interface that is down has no speed
        return None


def _number(path: Path) -> int | None:
    """A number of at least 0: the kernel says -1 where it does not know."""
    text = _text(path) or ""
    return int(text) if text.isdecimal() else None


class Board:
    """Texts that the ranks of a launch leave for each other in its store. No wait is longer than its `limit_s`."""

    def __init__(self, limit_s: float):
        """Raises what torch raises where the store at MASTER_ADDR and MASTER_PORT does not answer in time."""
        store, self.rank, self.size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=limit_s)))
        self.store = torch.distributed.PrefixStore(f"board {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def put(self, topic: str, value: Any) -> None:
        self.store.set(f"{topic} {self.rank}", json.dumps(value))

    def get(self, topic: str, rank: int, limit_s: float) -> Any:
        """What a rank put; None where it is not there in time."""
        try:
            self.store.wait([f"{topic} {rank}"], datetime.timedelta(seconds=max(0.1, limit_s)))
        except RuntimeError:  # of another class in each version
            return None
        return json.loads(self.store.get(f"{topic} {rank}"))

    def gather(self, topic: str, value: Any, limit_s: float) -> list[Any]:
        """Every rank's value in the order of the ranks; None for one that said nothing within `limit_s` in all."""
        self.put(topic, value)
        deadline = time.monotonic() + limit_s
        return [self.get(topic, rank, deadline - time.monotonic()) for rank in range(self.size)]

    def leave(self, limit_s: float) -> None:
        """Before the process ends: rank 0 may hold the store, and stays until the others have left."""
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self.gather("left", True, limit_s)
        else:
            self.put("left", True)


def hosts_of(findings: list[dict[str, Any]], per_host: int | None = None) -> list[list[int]]:
    """The ranks of each host; `per_host` as in `rooms.domain_of`."""
    hosts: dict[Any, list[int]] = {}
    for own in findings:
        hosts.setdefault((own["host"], own["rank"] // per_host if per_host else 0), []).append(own["rank"])
    return list(hosts.values())


def exchange_of(findings: list[dict[str, Any]], per_host: int | None = None) -> str:
    """How a group of all these ranks exchanges under `A2A_FFN_TRANSPORT=peers`, as `rooms.obstacle` decides it."""
    hosts = hosts_of(findings, per_host)
    reasons = {own["rank"]: own["peers_obstacle"] for own in findings if own["peers_obstacle"]}
    reasons |= {ranks[0]: "a rank is alone on its host" for ranks in hosts if len(ranks) == 1 and ranks[0] not in reasons}
    if reasons:
        rank = min(reasons)
        return f"by collectives alone: rank {rank}: {reasons[rank]}"
    if len(hosts) == 1:
        return "through the peers' memory"
    return "on two levels: through the peers' memory within a host, by collectives between hosts"


def describe(findings: list[dict[str, Any]], per_host: int | None = None) -> str:
    """The findings of all ranks as text: each host once, by its first rank."""
    by_rank = {own["rank"]: own for own in findings}
    hosts = hosts_of(findings, per_host)
    pretended = f", pretended: {per_host} rank(s) each" if per_host else ""
    lines = [f"{len(hosts)} host(s), {len(findings)} rank(s){pretended}"]
    for index, ranks in enumerate(hosts):
        lines += _host_lines(index, ranks, by_rank[ranks[0]])
    lines.append(f"A2A_FFN_TRANSPORT=peers  {exchange_of(findings, per_host)}")
    return "\n".join(lines)


def _host_lines(index: int, ranks: list[int], own: dict[str, Any]) -> list[str]:
    lines = [f"host {index}   {own['hostname']} ({own['host']}), ranks {', '.join(map(str, ranks))}, {own['cpus']} CPUs, "
             f"{own['numa_nodes']} NUMA node(s), driver {own['driver'] or 'none'}"]  # fmt: skip
    for gpu in own["gpus"]:
        major, minor = gpu["capability"]
        peers = ", ".join(map(str, gpu["peers"])) or "no other"
        lines.append(f"  gpu {gpu['index']:<4} {gpu['name']}, SM{major}{minor}, {gpu['memory_gib']} GiB, "
                     f"NUMA {_or_unknown(gpu['numa'])}, reads the memory of {peers}")  # fmt: skip
    if not own["gpus"]:
        lines.append("  gpu      none")
    for card in own["cards"]:
        lines.append(f"  card     {card['name']} {card['state']}, {card['rate']}, {card['layer']}, NUMA "
                     f"{_or_unknown(card['numa'])}, {' '.join(card['networks'])}")  # fmt: skip
    for each in own["networks"]:
        if each["addresses"] and each["state"] != "down":
            speed = f", {each['speed_mbit'] / 1000:g} Gbit/s" if each["speed_mbit"] else ""
            master = own["master"] and own["master"].get("interface") == each["name"]
            lines.append(f"  network  {each['name']} {' '.join(each['addresses'])}{speed}, NUMA {_or_unknown(each['numa'])}"
                         f"{', towards MASTER_ADDR' if master else ''}")  # fmt: skip
    return lines


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table on rank 0; returns 1 where a rank is missing or the file cannot be written, else 0.

    Leaves with status 2 where the command line or `A2A_FFN_RANKS_PER_HOST` is unfit.
    """
    parser = argparse.ArgumentParser(prog="python -m compile_overlap.topology", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the findings of all ranks here")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for all ranks (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.timeout <= MOST_SECONDS:
        parser.error(f"--timeout {options.timeout}: must be a number of seconds, above 0 and up to {MOST_SECONDS}")
    try:
        per_host = Settings.from_environment().ranks_per_host
        require_divisor(per_host, int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        parser.error(str(error))
    board = Board(options.timeout) if "RANK" in os.environ else None
    own = found(int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0)))
    findings = board.gather("found", own, options.timeout) if board else [own]
    missing = [rank for rank, each in enumerate(findings) if each is None]
    if own["rank"] == 0:
        present = [each for each in findings if each is not None]
        print(describe(present, per_host), flush=True)
        if missing:
            print(f"rank(s) {', '.join(map(str, missing))} said nothing within {options.timeout:g} s", flush=True)
    unwritten = own["rank"] == 0 and options.json and _write(options.json, present)
    if unwritten:
        print(f"error: --json {options.json}: {unwritten}", file=sys.stderr, flush=True)
    if board:
        board.leave(options.timeout)
    return int(bool(missing or unwritten))


def _write(file: str, present: list[dict[str, Any]]) -> OSError | None:
    """Write the findings; what keeps them from being written, or None."""
    try:
        Path(file).write_text(json.dumps(present, indent=1) + "\n")
    except OSError as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
