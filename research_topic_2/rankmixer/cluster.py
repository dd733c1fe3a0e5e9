"""What would make a job on several hosts fail or hang, found before it starts: `preflight.py --target cluster`.

Every rank looks at its host and reports by the launcher's store; then each connects to the others once. No process group
is formed and every wait is bounded, so a wrong address or a rank that is missing ends as a line and status 1.
"""

import concurrent.futures
import contextlib
import hashlib
import ipaddress
import os
import platform
import socket
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import torch

from rankmixer.runtime import nccl_version

CONNECT_S = 5
MAX_SKEW_S = 2.0
CAPABILITY = [9, 0]
FOLDERS = ("compile_overlap", "passes", "research_topic_2")
# What may differ: names of this host's interfaces, cards and files.
OF_A_HOST = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE"}
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def run(options):
    """Check this launch from every rank; rank 0 prints. Returns 0, 1 where anything is wrong, 2 without a launcher."""
    if "RANK" not in os.environ:
        print("error: target='cluster': start it on every node with torchrun, as the job", file=sys.stderr)
        return 2
    who = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    try:
        from compile_overlap import topology
    except ImportError as error:
        print(f"FAIL {who}: {error}; install this repository there, or put it on PYTHONPATH", flush=True)
        return 1
    try:
        board = topology.Board(options.timeout)
    except Exception as error:  # its class depends on the version and on what is wrong
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"FAIL {who}: no store at {master} within {options.timeout:g} s: {reason}", flush=True)
        return 1
    own = {**topology.found(board.rank, int(os.environ["LOCAL_RANK"])), **software(), "environment": variables()}
    own["address"], own["address_problem"] = own_address(own)
    own["gloo_problem"] = gloo_problem()
    with Listener(own["address"]) as listener:
        own["port"], own["listen_problem"] = listener.port, listener.problem
        findings = board.gather("found", own, options.timeout)
        reached = []
        if None not in findings:
            reached = board.gather("reached", reach(own, findings), options.timeout + CONNECT_S)
        reporter = next(rank for rank, each in enumerate(findings) if each is not None)
        if board.rank == reporter:
            lines = problems(findings, reached, options.tokens, options.device, options.timeout)
            print(report(findings, lines, topology), flush=True)
            board.put("verdict", not lines)
        # Ranks that came earlier wait for it longer: by what the reporter waits for the others.
        passed = board.get("verdict", reporter, 3 * options.timeout)
        board.leave(options.timeout)
    return 0 if passed else 1


def software():
    """Versions and a digest of every source file."""
    import compile_overlap

    roots = {folder: Path(compile_overlap.__file__).parents[1] / folder for folder in FOLDERS[:2]}
    roots[FOLDERS[2]] = Path(__file__).resolve().parents[1]
    sources = {
        f"{folder}/{path.relative_to(root)}": hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for folder, root in roots.items() for path in sorted(root.rglob("*.py")) if ".venv" not in path.parts
    }
    nccl = ".".join(map(str, nccl_version())) if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl,
                **{name: _version(name) for name in ("triton", "numpy")}}
    return {"versions": versions, "sources": sources}


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def variables():
    """Environment variables that change what a rank compiles or how it exchanges."""
    named = {name: value for name, value in os.environ.items() if name.startswith(("A2A_FFN_", "NCCL_"))}
    return {name: value for name, value in named.items() if name not in OF_A_HOST}


def own_address(own):
    """(the address under which other ranks are to reach this one, what is wrong with a variable that chooses it)."""
    for variable in INTERFACE_VARIABLES:
        names = os.environ.get(variable, "")
        if not names or names.startswith("^"):
            continue
        wanted = [name.removeprefix("=") for name in names.split(",")]
        fitting = [each for each in own["networks"] if each["addresses"] and each["name"].startswith(tuple(wanted))]
        if fitting:
            return fitting[0]["addresses"][0], ""
        have = ", ".join(each["name"] for each in own["networks"] if each["addresses"])
        return _towards_master(own), f"{variable}={names}: no such interface with an address; there are {have}"
    return _towards_master(own), ""


def _towards_master(own):
    return (own["master"] or {}).get("address", "")


def gloo_problem():
    """Why gloo would bind to the loopback: without `GLOO_SOCKET_IFNAME` it takes the address of the host's name."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return f"GLOO_SOCKET_IFNAME is not set and the host's name {name} has no address ({error}), so gloo takes the loopback"
    if not ipaddress.ip_address(address).is_loopback:
        return ""
    return f"GLOO_SOCKET_IFNAME is not set and the host's name {name} is {address}, which other hosts cannot reach"


class Listener:
    """Answers every connection with this host's time. `problem` says why it could not listen."""

    def __init__(self, address):
        self.socket, self.port, self.problem = None, None, ""
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self.socket = socket.create_server((address, 0), family=family, backlog=256)
            self.port = self.socket.getsockname()[1]
        except OSError as error:
            self.problem = f"cannot listen on {address or 'no address'}: {error}"

    def __enter__(self):
        if self.socket is not None:
            threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # ends the thread's `accept`, which keeps the port open otherwise
            self.socket.close()

    def _answer(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(CONNECT_S)
                try:
                    connection.sendall(f"{time.time():.6f}".encode())
                except OSError:
                    continue


def reach(own, findings):
    """Connect to every other rank. Returns [{"rank", "problem"} or {"rank", "skew_s", "uncertain_s"}]."""
    others = [other for other in findings if other["rank"] != own["rank"] and other["port"]]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(_connect, others))


def _connect(other):
    try:
        begin = time.time()
        with socket.create_connection((other["address"], other["port"]), timeout=CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            theirs = float(connection.recv(64))
        end = time.time()
    except (OSError, ValueError) as error:
        return {"rank": other["rank"], "problem": f"{type(error).__name__}: {error}"}
    return {"rank": other["rank"], "skew_s": theirs - (begin + end) / 2, "uncertain_s": (end - begin) / 2}


def problems(findings, reached, tokens, device, limit_s):
    """What is wrong, [(rank, text)]. `findings` and `reached` are all ranks'; None where a rank said nothing."""
    found = [(rank, f"said nothing within {limit_s:g} s") for rank, own in enumerate(findings) if own is None]
    size, present = len(findings), [own for own in findings if own is not None]
    if tokens % size:
        found.append((0, f"P = {size} ranks: must divide T = {tokens} (--tokens)"))
    several = len({own["host"] for own in present}) > 1
    for own in present:
        texts = [own["address_problem"], own["listen_problem"], *_differences(present[0], own)]
        texts += _gpu_problems(own, present[0]) if device == "cuda" else []
        texts += _address_problems(own, device) if several else []
        found += [(own["rank"], text) for text in texts if text]
    for rank, results in enumerate(reached):
        found += _connection_problems(rank, results, findings)
    return found


def _differences(first, own):
    """How a rank's software and settings differ from the first rank's."""
    for name, value in own["versions"].items():
        if value != first["versions"][name]:
            yield f"{name} {value}; rank {first['rank']} has {first['versions'][name]}"
    if own["driver"] != first["driver"]:
        yield f"driver {own['driver']}; rank {first['rank']} has {first['driver']}"
    for name in sorted(own["environment"].keys() | first["environment"].keys()):
        mine, theirs = own["environment"].get(name), first["environment"].get(name)
        if mine != theirs:
            yield f"{name} = {mine}; rank {first['rank']} has {theirs}"
    files = own["sources"].keys() | first["sources"].keys()
    changed = sorted(file for file in files if own["sources"].get(file) != first["sources"].get(file))
    if changed:
        digests = own["sources"].get(changed[0]), first["sources"].get(changed[0])
        yield (f"{len(changed)} source file(s) differ from rank {first['rank']}'s, the first is {changed[0]}: "
               f"{digests[0]} instead of {digests[1]}")


def _gpu_problems(own, first):
    gpus, index = own["gpus"], own["local_rank"]
    if index >= len(gpus):
        yield f"LOCAL_RANK = {index}: the host has {len(gpus)} GPU(s), one for each rank is needed"
        return
    gpu = gpus[index]
    if gpu["capability"] < CAPABILITY:
        yield f"{gpu['name']}: compute capability {'.'.join(map(str, gpu['capability']))}, 9.0 is needed"
    if first["gpus"] and gpu["name"] != first["gpus"][0]["name"]:
        yield f"{gpu['name']}; rank {first['rank']} has {first['gpus'][0]['name']}"


def _address_problems(own, device):
    if not own["address"]:
        yield f"no way to MASTER_ADDR: {own['master']}"
    elif ipaddress.ip_address(own["address"].partition("%")[0]).is_loopback:
        have = ", ".join(each["name"] for each in own["networks"] if each["name"] != "lo" and each["addresses"])
        yield (f"address {own['address']}: other hosts cannot reach the loopback; set MASTER_ADDR to an address of node 0, "
               f"or {' and '.join(INTERFACE_VARIABLES)} to one of {have}")
    if device == "cpu":
        yield own["gloo_problem"]


def _connection_problems(rank, results, findings):
    for result in results or ():
        other = findings[result["rank"]]
        if "problem" in result:
            place = f"{other['address']}:{other['port']}"
            yield rank, f"cannot reach rank {other['rank']} ({other['hostname']}) at {place}: {result['problem']}"
        elif rank == 0 and abs(result["skew_s"]) > MAX_SKEW_S + result["uncertain_s"]:
            yield other["rank"], f"clock {result['skew_s']:+.1f} s from rank 0's, at most {MAX_SKEW_S:g} s is allowed"


def report(findings, lines, topology):
    """The topology, what is wrong, once for the ranks of a host, and the verdict."""
    present = [own for own in findings if own is not None]
    grouped = {}
    for rank, text in lines:
        own = findings[rank]
        grouped.setdefault((own["hostname"] if own else "unknown host", text), []).append(rank)
    texts = [topology.describe(present)]
    for (host, text), ranks in grouped.items():
        texts.append(f"FAIL rank {','.join(map(str, ranks))} ({host}): {text}")
    if not lines:
        texts.append(f"ok   {len(findings)} ranks: software, sources, settings, GPUs, addresses and clocks agree")
    return "\n".join([*texts, f"preflight cluster: {'FAIL' if lines else 'PASS'}"])
