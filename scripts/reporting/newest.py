"""Which record a sentence, table or figure speaks of: the newest comparable one, by what it holds, not by its name.

Comparable are measurements of the default workload on two H200s whose settings are the defaults, but for what says how
often something is measured and what is checked. Among those over one link, in one direction, compiled or not, that hold
every mode asked for, it is that of the highest torch version, then of the newest commit, then the last by name. Which
commit is newer stands in reports/commits.json, which `scripts/report.py` keeps; one that is not there yet is newest.

Where there is none, the record is an empty one, which is false and prints `no record`; `missing` says what it lacks.
"""

from __future__ import annotations

import re
from typing import Iterable, Iterator

from .citations import MEANINGS, Record, Results

NVLINK, HOST_MEMORY, SHAPED = "NVLink", "host shared memory", "a shaped CPU link"
SOCKETS, NODES_MEMORY = "sockets of two nodes on one host", "host shared memory of two nodes on one host"
FORWARD, BACKWARD = "forward", "forward+backward"
DEVICE, RANKS = "NVIDIA H200", 2
DEFAULT_SHAPE = (512, 64, 1280, 6)
SHAPE = ("batch_size", "tokens", "dim", "k")
_OTHER_MACHINES = ("cross", "hosts", "tcp")  # in the names of folders: CPU hosts that are emulated, other links
# Settings that leave what is measured what it is.
PROTOCOL = frozenset((
    "backward", "check_correctness", "device", "draw", "full_batch_check", "iterations", "json", "modes", "no_compile",
    "num_tests", "output", "overlap", "own_comp_only", "rounds", "seed", "shapes", "warmup", "worker",
))  # fmt: skip


class Newest:
    """Chooses among the records of a `Results`."""

    def __init__(self, results: Results):
        self.results = results

    def __call__(
        self, link: str, modes: Iterable[str], direction: str = FORWARD, compiled: bool = True,
        shape: tuple = DEFAULT_SHAPE, commit: str = "",
    ) -> Record:  # fmt: skip
        """The newest comparable record of these modes; with `commit`, of that one alone (its beginning)."""
        modes = list(modes)
        found = [
            each for each in self.comparable(link, direction, compiled, shape)
            if all(map(each.mode, modes)) and each.get("environment", "git_commit").startswith(commit)
        ]  # fmt: skip
        if found:
            return max(found, key=self._age)
        how = "" if link == SHAPED else ", compiled" if compiled else ", eager"
        names = ", ".join(f"`{mode}`" for mode in modes)
        size = "" if shape == DEFAULT_SHAPE else f" at {shape}"
        return Record(self.results, "", lacks=f"{names} over {link}{size}, {direction}{how}")

    def comparable(self, link: str, direction: str, compiled: bool, shape: tuple = DEFAULT_SHAPE) -> list[Record]:
        """All of one link, direction and compilation, by file."""
        return [
            each for each in self.results.comparisons()
            if link_of(each) == link and each.get("pass") == direction and _as_asked(each, link, compiled, shape)
        ]  # fmt: skip

    def of_newest_version(self, link: str, direction: str, compiled: bool) -> list[Record]:
        """Those of the highest torch version."""
        found = self.comparable(link, direction, compiled)
        highest = max(map(_version, found), default=None)
        return [each for each in found if _version(each) == highest]

    def traces(self, link: str, modes: Iterable[str], direction: str = FORWARD) -> list[Record]:
        """Of these modes the newest traces that are all of one commit and version, in the order of the modes."""
        modes = list(modes)
        groups: dict[tuple, dict[str, Record]] = {}
        for each in self.results.of_kind("trace"):
            if link_of(each) == link and each.get("pass") == direction and _by_default(each):
                groups.setdefault((self._age(each)[:2]), {})[each.get("mode")] = each
        found = {age: [_trace_of(mode, traces) for mode in modes] for age, traces in groups.items()}
        whole = [age for age, traces in found.items() if all(traces)]
        if whole:
            return found[max(whole)]
        return [Record(self.results, "", lacks=f"a trace of `{mode}` over {link}, {direction}") for mode in modes]

    def single_runs(self, shape: tuple, modes: Iterable[str], direction: str = FORWARD) -> Iterator[list[Record]]:
        """For each torch version, highest first, the newest eager runs of one mode each that are all of one commit."""
        modes = list(modes)
        groups: dict[tuple, dict[str, Record]] = {}
        for each in self.results.of_kind("full"):
            eager = each.get("pass") == direction and each.get(*each.setting("no_compile")) is True
            checks = each.get("configuration", "seed", "overridden")  # public_check's, of few calls
            if eager and not checks and link_of(each) == NVLINK and _sizes(each) == shape and _by_default(each, SHAPE):
                groups.setdefault(self._age(each)[:2], {}).setdefault(each.get(*each.setting("overlap")), each)
        whole = [age for age, runs in groups.items() if set(modes) <= set(runs)]
        for version in sorted({version for version, _ in whole}, reverse=True):
            yield [groups[max(age for age in whole if age[0] == version)][mode] for mode in modes]

    def _age(self, record: Record) -> tuple:
        commit = record.get("environment", "git_commit")
        return _version(record), self.results.ages.get(commit, len(self.results.ages)), record.file, record.prefix


def missing(*records: Record) -> str:
    """One line: what the empty ones among the records would have to hold."""
    return f"No record yet: {'; '.join(each.lacks for each in records if not each)}."


def link_of(record: Record) -> str | None:
    """The link that a record was measured over: by its folder, its variables or, of the shaped one, its modes."""
    parts = record.file.split("/")[:-1]
    if "passes" in record.modes:
        return SHAPED
    if any(mark in part for part in parts for mark in _OTHER_MACHINES):
        return None
    if any("nodes" in part for part in parts):
        return SOCKETS if any("sockets" in part for part in parts) else NODES_MEMORY
    by_variable = (record.get("variables") or {}).get("NCCL_P2P_DISABLE") == "1"
    return HOST_MEMORY if by_variable or any(re.search(r"\bshm\b|_shm", part) for part in parts) else NVLINK


def options_of(record: Record) -> list[str]:
    """Other settings than the defaults that change what is measured, as on the command line; sizes have own columns."""
    found = []
    for name, setting in (record.get("configuration") or {}).items():
        if setting.get("overridden") and name not in (*PROTOCOL, *SHAPE):
            flag = f"--{name.replace('_', '-')}"
            found.append(flag if setting["value"] is True else f"{flag} {setting['value']}")
    return found


def _trace_of(name: str, traces: dict[str, Record]) -> Record | None:
    """The trace of a mode, or of the first one that `MEANINGS` names and whose kernels show the same transport."""
    if name not in MEANINGS:
        return traces.get(name)
    known = [traces[mode] for mode in MEANINGS[name] if mode in traces]
    return next((each for each in known if _stores_to_peers(each) == ("peers" in name)), None)


def _stores_to_peers(trace: Record) -> bool:
    return any("gemm_combine" in kernel["name"] for kernel in trace.get("kernels"))


def _as_asked(record: Record, link: str, compiled: bool, shape: tuple) -> bool:
    if link == SHAPED:
        return True
    # Where plans are kept, or that none are, changes nothing that is measured without `--tune`.
    forced = any(name.startswith("A2A_FFN_") and name != "A2A_FFN_PLANS" for name in record.get("variables") or ())
    eager = record.get(*record.setting("no_compile"))
    return eager is not compiled and not forced and _sizes(record) == shape and _by_default(record, SHAPE)


def _by_default(record: Record, besides: Iterable[str] = ()) -> bool:
    device = record.get("environment", "device") or ""
    ranks = record.get("world_size") or len(record.get("ranks") or ())
    overridden = {name for name, each in record.get("configuration").items() if each.get("overridden")}
    return device.startswith(DEVICE) and ranks == RANKS and overridden <= {*PROTOCOL, *besides}


def _sizes(record: Record) -> tuple:
    return tuple(record.get(*record.setting(name)) for name in SHAPE)


def _version(record: Record) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", record.get("environment", "torch").partition("+")[0])))
