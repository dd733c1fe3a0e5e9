"""Faults of a group of ranks: errors that name the ranks at fault, told over the group's store.

A collective cannot tell what went wrong, since it is what fails: it hangs, or says that a connection was closed. So
ranks write short texts into the store through which their group was made:

    agree      before a configuration's first exchange each rank writes what it is about to do and reads the others'
    explained  a rank whose call failed writes why; where an exchange failed, it reads what the others wrote, and names
               those that failed by themselves and those that are silent: they died, or they stall

A call like an earlier one writes and reads nothing. No wait is longer than the timeout of the process group, which is
its `timeout` in `init_process_group` or `new_group`: 30 minutes for gloo and 10 for NCCL unless it is set.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import torch
import torch.distributed as dist

from . import compat

GRACE_S = 10  # how long a rank whose exchange failed waits for the others' words, unless the group's timeout is shorter
MOST_AGREED = 1024  # configurations that a group remembers to have agreed on
MOST_CHARACTERS = 500  # of an error's text, and of a value that ranks differ in
_SLOWEST_POLL_S, _MARGIN_S = 0.05, 1.0
_OF_EXCHANGES = ("gloo", "pair closure", "nccl", "connection closed by peer", "cuda error", "socket")


class RankFault(RuntimeError):
    """Other ranks of the group keep this one from going on; the message names them and says why."""


class _Word(NamedTuple):
    """What a rank whose call failed writes: how many of its calls have, whether by itself, in what, and the error."""

    count: int
    alone: bool
    doing: str
    error: str


class _Board:
    """What the ranks of one group write for each other. `ranks`: their numbers in the job; `own`: this one's."""

    def __init__(self, group: Any, again: int):
        self._store = compat.store_of(group)
        self.ranks, self.own = dist.get_process_group_ranks(group), dist.get_rank()
        self.timeout_s = compat.timeout_s(group)
        self._name, self.agreed, self.failed = f"compile_overlap/{again}", 0, 0
        self.known: dict[Any, None] = {}

    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.own]

    def propose(self, text: str) -> dict[int, str]:
        """What each rank proposes; of those that do not in time, nothing. Stops early where a rank fails meanwhile."""
        self.agreed += 1
        keys = {rank: self._proposal(self.agreed, rank) for rank in self.ranks}
        fault = f"{self._name}/failures/{self.failed + 1}"
        begin = time.monotonic()

        def exchange():
            self._store.set(keys[self.own], text)
            found = self._await(keys, begin + self.timeout_s, lambda: self._store.check([fault]))
            if len(found) == len(keys) and self.agreed > 1:  # so everybody has read the one before
                self._store.delete_key(self._proposal(self.agreed - 1, self.own))
            return found

        return bounded(self.timeout_s + GRACE_S, exchange)

    def part(self, name: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have read what `name` is about: the process that ends then may be the store's."""
        keys = {rank: f"{self._name}/read/{name}/{rank}" for rank in (*ranks, self.own)}

        def wait():
            self._store.set(keys[self.own], "")
            self._await(keys, time.monotonic() + self.grace_s)

        with contextlib.suppress(RuntimeError, TimeoutError):  # then the store is gone, and nobody can read
            bounded(self.grace_s + _MARGIN_S, wait)

    def _proposal(self, number: int, rank: int) -> str:
        return f"{self._name}/proposals/{self.failed}/{number}/{rank}"

    def tell(self, word: _Word) -> None:
        self.failed, self.agreed = self.failed + 1, 0  # a rank that failed early has not counted the last proposal

        def write():
            self._store.set(f"{self._name}/words/{self.own}", json.dumps(word))
            self._store.set(f"{self._name}/failures/{self.failed}", "")

        bounded(self.grace_s + _MARGIN_S, write)

    def words(self) -> dict[int, _Word]:
        """What the other ranks say about the failure that this one has just told, as far as they do in time."""
        keys = {rank: f"{self._name}/words/{rank}" for rank in self.others()}
        deadline = time.monotonic() + self.grace_s

        def read():
            new = {}
            while True:
                found = self._await(keys, time.monotonic())
                new = {rank: _Word(*json.loads(text)) for rank, text in found.items()}
                new = {rank: word for rank, word in new.items() if word.count >= self.failed}
                if len(new) == len(keys) or time.monotonic() > deadline:
                    return new
                time.sleep(_SLOWEST_POLL_S)

        return bounded(self.grace_s + _MARGIN_S, read)

    @property
    def grace_s(self) -> float:
        return min(GRACE_S, self.timeout_s)

    def _await(
        self, keys: dict[int, str], deadline: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[int, str]:
        """The texts under these keys, of those that are written before the deadline, or before `stop()`."""
        pause = 1e-3
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline and not stop():
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)
        written = [rank for rank, key in keys.items() if self._store.check([key])]
        return {rank: self._store.get(keys[rank]).decode() for rank in written}


def bounded(seconds: float, call: Callable[[], Any]) -> Any:
    """`call()`, or TimeoutError after `seconds`: a store in a process that is frozen never answers."""
    outcome: list[tuple[Any, Exception | None]] = []

    def run():
        try:
            outcome.append((call(), None))
        except Exception as error:  # raised below, in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


_BOARDS: weakref.WeakKeyDictionary[Any, _Board] = weakref.WeakKeyDictionary()
_NAMED: Counter[str] = Counter()  # groups of a name that this process has had: a store may outlive a group


def _board(group: Any) -> _Board | None:
    """The board of a group of several ranks that are processes; None for others, and for a group that is no more."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    if not compat.is_registered(group) or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _BOARDS:
        _NAMED[group.group_name] += 1
        _BOARDS[group] = _Board(group, _NAMED[group.group_name])
    return _BOARDS[group]


@functools.lru_cache(maxsize=None)
def versions() -> dict[str, str]:
    """What must be equal on all ranks beside a call's arguments: torch, Triton, and the source of this package."""
    import passes

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(passes.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return {"torch": torch.__version__, "triton": compat.TRITON_VERSION, "compile_overlap": digest.hexdigest()[:12]}


def agree_once(group: Any, what: str, configuration: dict[str, Any]) -> None:
    """As `agree`, for a configuration that this group has not agreed on yet; one that it has costs a look-up."""
    board = _board(group)
    key = what, tuple(configuration.items())
    if board is not None and key not in board.known:
        agree(group, what, configuration)
        board.known[key] = None
        if len(board.known) > MOST_AGREED:  # the oldest, which is the same one on every rank
            del board.known[next(iter(board.known))]


def agree(group: Any, what: str, configuration: dict[str, Any]) -> None:
    """Make sure that all ranks of `group` (None: the default group) are about to do the same; all of them call this.

    `configuration`: what it depends on, by name; compared as text. `what` names it for a rank that waits in vain.

    Raises:
        ValueError: on every rank, where ranks differ: which of the values, and which rank has what.
        RankFault: ranks do not come within the group's timeout, or fail before; which, and why if they could say.
    """
    board = _board(group)
    if board is None:
        return
    own = {name: str(value) for name, value in configuration.items()}
    proposals = _asked(board, lambda: board.propose(json.dumps(own)))
    if len(proposals) < len(board.ranks):
        missing = [rank for rank in board.ranks if rank not in proposals]
        raise RankFault(f"{_ranks(missing)} did not come to agree on {what}")
    found = {rank: json.loads(text) for rank, text in proposals.items()}
    names = dict.fromkeys(name for each in found.values() for name in each)
    differing = [name for name in names if len({each.get(name) for each in found.values()}) > 1]
    if differing:
        board.part(f"proposals/{board.failed}/{board.agreed}", board.others())
        values = {name: {rank: each.get(name, "unknown") for rank, each in found.items()} for name in differing}
        parts = "; ".join(f"{name} is {_by_value(each)}" for name, each in values.items())
        raise ValueError(f"{what}: must be the same on every rank of the group, but {parts}")


def _by_value(values: dict[int, str]) -> str:
    """Which ranks have which value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{_short(value)} on {_ranks(having)}" for value, having in ranks.items())


def explained(group: Any, error: Exception, doing: str) -> Exception:
    """What a rank raises whose call failed with `error`: the same, or a `RankFault` that names the ranks at fault.

    Tells the other ranks of `group` (None: the default group). Where an exchange failed, waits for what they tell, for
    ten seconds or the group's timeout, whichever is shorter.
    """
    board = _board(group)
    if board is None or getattr(error, "is_told", False):
        return error
    exchanged = isinstance(error, RankFault) or _is_of_exchange(error)
    try:
        board.tell(_Word(board.failed + 1, not exchanged, doing, _short(error)))
        words = board.words() if exchanged else {}
        fault = RankFault(_told(board, words, error, doing)) if exchanged else error
        board.part(f"words/{board.failed}", [rank for rank, word in words.items() if not word.alone])
    except (RuntimeError, TimeoutError) as lost:
        fault = RankFault(f"{doing} failed: {_short(error)}; {_store_lost(lost)}") if exchanged else error
    fault.is_told = True
    return fault


@contextlib.contextmanager
def watched(group: Any = None) -> Iterator[None]:
    """Around a training step or a whole loop: errors of exchanges in it name the ranks at fault, as `forward_ffn`'s do.

    For what `forward_ffn` does not see: backward, and calls inside an outer `torch.compile`. `group`: the
    expert-parallel group, None for the default one. Costs nothing until something is raised.

    Raises:
        RankFault: an exchange failed; from the original error. Any other error is raised as it is, and told to the
            group's ranks, whose own errors then name it.
    """
    try:
        yield
    except Exception as error:
        fault = explained(group, error, "a step")
        if fault is error:
            raise
        raise fault from error


def _told(board: _Board, words: dict[int, _Word], error: Exception, doing: str) -> str:
    """The message about a failed exchange: those at fault first."""
    silent = [rank for rank in board.others() if rank not in words]
    parts = [f"rank {rank} failed in {word.doing}: {word.error}" for rank, word in words.items() if word.alone]
    if silent:
        parts.append(f"{_ranks(silent)} died or stalled: no word within {board.grace_s:g} s")
    if not parts:
        places = {rank: word.doing for rank, word in words.items()} | {board.own: doing}
        alike = len(set(places.values())) == 1
        different = f"ranks made different calls: {_by_value(places)}"
        parts = ["every rank waited for the others: one came too late" if alike else different]
    return f"{'; '.join(parts)}. Rank {board.own} was in {doing}: {_short(error)}"


def _asked(board: _Board, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (RuntimeError, TimeoutError) as error:
        raise RankFault(_store_lost(error)) from error


def _store_lost(error: Exception) -> str:
    holder = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    return f"the group's store is lost, whose process ({holder}, as a rule) died or stalled: {_short(error)}"


def _is_of_exchange(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(mark in text for mark in _OF_EXCHANGES)
    )


def _short(value: Any) -> str:
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else str(value)
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else line[:MOST_CHARACTERS] + "..."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def reset() -> None:
    """Forget what was agreed."""
    for board in _BOARDS.values():
        board.known.clear()
