#!/usr/bin/env python
"""Makes faults on the ranks of a group and records what every rank saw, how long it took, and what was left over.

    python scripts/faults.py --json reports/results/cpu-faults/faults.json     # three gloo ranks, CPU
    python scripts/faults.py --device cuda                                     # a rank for each GPU, NCCL
    python scripts/faults.py --only stalls,dies-in-a-call

Each fault is a run of its own: ranks as processes without a launcher (one run with torchrun), a process group with
`--timeout` seconds, a RankMixer FFN. The last rank is at fault unless the table says otherwise; seconds count from the
fault. Afterwards the script looks for processes of that run, for the files in /dev/shm that they mapped and for locks
that are held in the compiler's cache, and makes a run without a fault, on the same port and cache.

Exit status: 1 where a rank did not end by itself, where something was left over, or where the run afterwards failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

from faulty_ranks import AGAIN, DECIDED, FAULTS, HEALTHY, RUNS, Fault, run_rank  # noqa: E402

STARTING_S = 600  # for a whole run, compilation included
WORKERS_NOTICE_S = 10
LOOK_S = 0.5  # between looks at what shared memory the ranks map
OF_IMPORTS = "No CUDA runtime is found"  # torch, where there is a CUDA toolkit but no GPU
STOPPED = "stopped by this script"
MARK = "FAULTS_RUN"


def main() -> int:
    options = _parser().parse_args()
    if options.rank_of:
        return run_rank(RUNS[options.rank_of], options.device, Path(options.folder))
    names = options.only.split(",") if options.only else list(FAULTS)
    if unknown := sorted(set(names) - set(FAULTS)):
        raise SystemExit(f"--only {options.only!r}: {', '.join(unknown)}: there are {', '.join(FAULTS)}")
    if not any(FAULTS[name].device in (None, options.device) for name in names):
        raise SystemExit(f"--only {options.only!r}: none of these can be made with --device {options.device}")
    if options.device == "cpu":  # before the ranks are forked
        import compile_overlap  # noqa: F401
        import torch._inductor.compile_fx  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        table = _Table(options, Path(folder))
        table.run("healthy", HEALTHY)  # fills the compiler's cache
        rows = [table.row(name, fault) for name, fault in FAULTS.items() if name in names and table.can_make(fault)]
    if options.json:
        _write(options, rows)
    return int(any(row["problems"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--ranks", type=int, default=3, help="on CPU; on GPUs one for each, 2, 3, 4 or 6 (default: %(default)s)")
    add("--timeout", type=float, default=20.0, help="seconds of the process group (default: %(default)s)")
    add("--only", metavar="NAMES", help=f"of {', '.join(FAULTS)}")
    add("--json", metavar="FILE", help="write the record here")
    add("--rank-of", metavar="NAME", help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    return parser


class _Table:
    """Runs faults one after the other, on one port and with one compiler's cache."""

    def __init__(self, options, folder: Path):
        self.options, self.folder, self.port = options, folder, _free_port()
        self.ranks = _gpus() if options.device == "cuda" else options.ranks

    def can_make(self, fault: Fault) -> bool:
        return fault.device in (None, self.options.device)

    def row(self, name: str, fault: Fault) -> dict:
        """One fault, what it left over, and a run afterwards."""
        ranks, hung = self.run(name, fault)
        shared = sorted(file for file in self.shared if os.path.exists(file))
        left = {"processes": self.processes(name), "shared_memory": shared, "locks": self.locks()}
        begin = time.monotonic()
        again, _ = self.run(f"{name}-again", AGAIN)
        rerun = {"ok": all(rank["status"] == 0 for rank in again), "seconds": round(time.monotonic() - begin, 1)}
        problems = [f"{kind} left over: {found}" for kind, found in left.items() if found]
        problems += [f"rank {rank} did not end" for rank in hung]
        problems += [] if rerun["ok"] else ["the run afterwards failed"]
        at_fault = fault.who % self.ranks
        row = {"name": name, "fault": f"rank {at_fault} {fault.text}", "at_fault": at_fault, "ranks": ranks,
               "left_over": left, "rerun": rerun, "problems": problems}  # fmt: skip
        _print(row)
        return row

    def run(self, name: str, fault: Fault) -> tuple[list[dict], list[int]]:
        """What each rank saw: its status, seconds from the fault to its end, its last message; and who did not end.

        A rank that is at fault by not ending is no problem, and killed.
        """
        folder = self.folder / name
        folder.mkdir()
        processes = self._started(name, fault, folder)
        stays = {fault.who % self.ranks} if fault.step in ("stalls", "is_stopped") else set()
        ended, begin, looked = {}, time.monotonic(), 0.0
        self.shared = set()
        while set(range(len(processes))) - stays - set(ended) and time.monotonic() - begin < STARTING_S:
            for rank, each in enumerate(processes):
                if rank not in ended and each.status() is not None:
                    ended[rank] = time.time()
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self.shared |= _mapped(f"{MARK}={self.port}-{name}")
            time.sleep(0.02)
        hung = [rank for rank in range(len(processes)) if rank not in ended]
        statuses = [each.end() for each in processes]
        made = folder / "fault"
        seen = []
        for rank in range(self.ranks):
            process = 0 if fault.torchrun else rank
            seconds = max(0.0, ended[process] - made.stat().st_mtime) if made.exists() and process in ended else None
            seconds = None if seconds is None else round(seconds, 1)
            words = _last_words(folder, rank)
            if process in hung:
                words = f"{words}; {STOPPED}" if words else STOPPED
            seen.append({"rank": rank, "status": statuses[process], "seconds": seconds, "message": words})
        return seen, [rank for rank in hung if rank not in stays]

    def _started(self, name: str, fault: Fault, folder: Path) -> list[_Forked | _Launched]:
        """The launcher, or a process for each rank: with CUDA, which may not be forked, one that imports by itself."""
        own = [__file__, "--rank-of", _name_of(fault), "--folder", str(folder), "--device", self.options.device]
        if fault.torchrun:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--master-port", str(self.port)]
            return [_Launched([*launcher, *own], self._environment(name, fault, None), folder / "launcher.log")]
        environments = [self._environment(name, fault, rank) for rank in range(self.ranks)]
        if self.options.device == "cuda":
            return [_Launched(own, each, folder / f"{each['RANK']}.log") for each in environments]
        return [_Forked((fault, self.options.device, folder, rank, each)) for rank, each in enumerate(environments)]

    def _environment(self, name: str, fault: Fault, rank: int | None) -> dict[str, str]:
        common = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), "A2A_FFN_KERNEL_PLUGIN": "compile_overlap",
                  "A2A_TIMEOUT_S": str(self.options.timeout), MARK: f"{self.port}-{name}", **DECIDED,
                  **fault.everywhere}  # fmt: skip
        if rank is None:
            return common
        own = fault.settings if rank == fault.who % self.ranks else {}
        return {**common, **own, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}  # fmt: skip

    def processes(self, name: str) -> list[str]:
        """Command lines of processes that this run left; Inductor's compile workers take a second to notice."""
        deadline = time.monotonic() + WORKERS_NOTICE_S
        while (left := _commands(f"{MARK}={self.port}-{name}")) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def locks(self) -> list[str]:
        """Locks in the compiler's cache that somebody holds."""
        held = []
        for path in (self.folder / "cache").rglob("*.lock"):
            with open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(path.name)
        return held


class _Forked:
    """A rank in a process of its own, forked from this one, which has imported what takes long."""

    def __init__(self, arguments: tuple):
        self._process = multiprocessing.get_context("fork").Process(target=_forked, args=arguments)
        self._process.start()

    def status(self) -> int | None:
        return self._process.exitcode

    def end(self) -> int:
        """Its status, after killing it where it has not ended."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode


class _Launched:
    """A rank that Python starts anew, or a launcher and its ranks."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path):
        with open(log, "w") as file:
            command = [sys.executable, *arguments]
            self._process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)

    def status(self) -> int | None:
        return self._process.poll()

    def end(self) -> int:
        self._process.kill()
        return self._process.wait()


def _forked(fault: Fault, device: str, folder: Path, rank: int, environment: dict[str, str]) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    run_rank(fault, device, folder)


def _name_of(fault: Fault) -> str:
    return next(name for name, each in RUNS.items() if each is fault)


def _places(mark: str) -> list[Path]:
    """The folders in /proc of living processes whose environment holds a mark."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"{mark}\0".encode() in (place / "environ").read_bytes()
            if marked and "\nState:\tZ" not in (place / "status").read_text():
                found.append(place)
    return found


def _commands(mark: str) -> list[str]:
    """The command lines of the processes of a mark."""
    commands = []
    for place in _places(mark):
        with contextlib.suppress(OSError):
            commands.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
    return commands


def _mapped(mark: str) -> set[str]:
    """The files in /dev/shm that processes of a mark map."""
    files = set()
    for place in _places(mark):
        with contextlib.suppress(OSError):
            files |= set(re.findall(r"/dev/shm/\S+", (place / "maps").read_text()))
    return files


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _gpus() -> int:
    import torch
    from rankmixer.runtime import shares_gpus

    most = 3 if torch.cuda.is_available() and shares_gpus() else torch.cuda.device_count()
    usable = [count for count in (2, 3, 4, 6) if count <= most]  # L = T/P is whole
    if not usable:
        raise SystemExit(f"--device cuda: {torch.cuda.device_count()} GPU(s) here; two are needed")
    return usable[-1]


def _last_words(folder: Path, rank: int) -> str:
    """What the rank reported last; else the last line of its log that it did not write while importing."""
    report = folder / f"{rank}.txt"
    if report.exists():
        return report.read_text()
    log = folder / f"{rank}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    said = [line for line in lines if OF_IMPORTS not in line]
    return said[-1][:300] if said else ""


def _print(row: dict) -> None:
    print(f"{row['name']}: {row['fault']}")
    for rank in row["ranks"]:
        words = rank["message"] or "no message"
        after = "" if rank["seconds"] is None else f" after {rank['seconds']} s"
        print(f"  rank {rank['rank']}: status {rank['status']}{after}; {words}")
    again = f"the run afterwards {'worked' if row['rerun']['ok'] else 'failed'} ({row['rerun']['seconds']} s)"
    print(f"  {'; '.join(row['problems']) or 'nothing left over'}; {again}", flush=True)


def _write(options, rows: list[dict]) -> None:
    import torch
    from rankmixer import record

    content = {
        "schema": record.SCHEMA_VERSION,
        "kind": "faults",
        "environment": record.environment(torch.device(options.device)),
        "world_size": len(rows[0]["ranks"]),
        "timeout_s": options.timeout,
        "faults": rows,
    }
    record.write(content, options.json)


if __name__ == "__main__":
    sys.exit(main())
