"""Faults of a group of ranks: errors that name the ranks at fault, told over the group's store.

A collective cannot tell what went wrong, since it is what fails: it hangs, or says that a connection was closed. So
ranks write short texts into the store through which their group was made:

    agree      before a configuration's first exchange each rank writes what it is about to do and reads the others'
    explained  a rank whose call failed writes why; where an exchange failed, it reads what the others wrote, and names
               those that failed by themselves and those that are silent: they died, or they stall

A call like an earlier one writes and reads nothing. No wait is longer than the timeout of the process group, which is
its `timeout` in `init_process_group` or `new_group`: 30 minutes for gloo and 10 for NCCL unless it is set. How they
find each other there, and what a rank may do that has handled its error: `board`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

from . import compat
from .board import OF_CALL, OF_GROUP, OF_STEP, Board, Word

MOST_AGREED = 1024  # configurations that a group remembers to have agreed on
MOST_CHARACTERS = 500  # of an error's text, and of a value that ranks differ in
_OF_EXCHANGES = ("gloo", "pair closure", "nccl", "connection closed by peer", "cuda error", "socket")


class RankFault(RuntimeError):
    """Other ranks of the group keep this one from going on; the message names them and says why.

    `outcome`: what that means for the others (see `board`).
    """

    def __init__(self, message: str, outcome: str = OF_GROUP):
        super().__init__(message)
        self.outcome = outcome


_BOARDS: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def _board(group: Any) -> Board | None:
    """The board of a group of several ranks that are processes; None for others, and for a group that is no more.

    Made at the first call. Raises RuntimeError or TimeoutError where the group's store does not answer then.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or not compat.is_registered(group):
        return None
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _BOARDS:
        _BOARDS[group] = Board(group)
    return _BOARDS[group]


def enter(group: Any) -> None:
    """Before a call that all ranks of `group` (None: the default group) make, and that may fail on some of them."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # said when something is to be told
        _board(group)


def begin(group: Any) -> None:
    """Before the exchanges of a call of `group` (None: the default group): its ranks are past what comes before them."""
    board = _BOARDS.get(dist.group.WORLD if group is None else group)
    if board is not None:
        board.begin()


@functools.lru_cache(maxsize=None)
def versions() -> dict[str, str]:
    """What must be equal on all ranks beside a call's arguments: torch, Triton, and the source of this package."""
    import passes

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(passes.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return {"torch": torch.__version__, "triton": compat.TRITON_VERSION, "compile_overlap": digest.hexdigest()[:12]}


def agree_once(group: Any, P: int, what: str, configuration: dict[str, Any]) -> None:
    """As `agree`, for a configuration that this group has not agreed on yet; one that it has costs a look-up."""
    board = None if P == 1 else _asked(lambda: _board(group))
    key = what, tuple(configuration.items())
    if board is not None and key not in board.known:
        agree(group, P, what, configuration)
        board.known[key] = None
        if len(board.known) > MOST_AGREED:  # the oldest, which is the same one on every rank
            del board.known[next(iter(board.known))]


def agree(group: Any, P: int, what: str, configuration: dict[str, Any]) -> None:
    """Make sure that all P ranks of `group` (None: the default group) are about to do the same; all of them call this.

    A layer of one rank asks nobody, whatever group it names.
    `configuration`: what it depends on, by name; compared as text. `what` names it for a rank that waits in vain.

    Raises:
        ValueError: on every rank, where ranks differ: which of the values, and which rank has what.
        RankFault: ranks do not come within the group's timeout, or fail before; which, and why if they could say.
    """
    board = None if P == 1 else _asked(lambda: _board(group))
    if board is None:
        return
    own = {name: str(value) for name, value in configuration.items()}
    proposals, missing, outcome = _asked(lambda: board.propose(json.dumps(own)))
    if missing:
        raise RankFault(f"{_ranks(missing)} did not come to agree on {what}", outcome)
    found = {rank: json.loads(text) for rank, text in proposals.items()}
    names = dict.fromkeys(name for each in found.values() for name in each)
    differing = [name for name in names if len({each.get(name) for each in found.values()}) > 1]
    if differing:
        board.part(f"proposals/{board.failed}/{board.place.agreed}", board.others())
        values = {name: {rank: each.get(name, "unknown") for rank, each in found.items()} for name in differing}
        parts = "; ".join(f"{name} is {_by_value(each)}" for name, each in values.items())
        error = ValueError(f"{what}: must be the same on every rank of the group, but {parts}")
        error.is_told = True  # every rank raises it
        raise error


def _by_value(values: dict[int, str]) -> str:
    """Which ranks have which value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{_short(value)} on {_ranks(having)}" for value, having in ranks.items())


def explained(group: Any, error: Exception, doing: str, before: bool = False) -> Exception:
    """What a rank raises whose call failed with `error`: the same, or a `RankFault` that names the ranks at fault.

    Tells the other ranks of `group` (None: the default group). Where an exchange failed, waits for what they tell, for
    ten seconds or the group's timeout, whichever is shorter. `before`: the call failed before its exchange, so that no
    other rank can go on with it.
    """
    if getattr(error, "is_told", False):
        return error
    fault, alone = error, not (isinstance(error, RankFault) or _is_of_exchange(error))
    outcome = (OF_CALL if before else OF_STEP) if alone else getattr(error, "outcome", OF_GROUP)
    try:
        board = _board(group)
        if board is None:
            return error
        word = Word(board.failed + 1, board.place, alone, outcome, doing, _short(error))
        board.tell(word)
        if not alone:
            words = board.answers(word)
            fault = RankFault(_told(board, words, error, doing))
            read = f"words/{word.count}/{'' if outcome == OF_GROUP else word.place}"
            board.part(read, [rank for rank, each in words.items() if each.outcome == outcome and not each.alone])
    except (RuntimeError, TimeoutError) as lost:
        fault = error if alone else RankFault(f"{doing} failed: {_short(error)}; {_store_lost(lost)}")
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
    enter(group)
    try:
        yield
    except Exception as error:
        fault = explained(group, error, "a step")
        if fault is error:
            raise
        raise fault from error


def _told(board: Board, words: dict[int, Word], error: Exception, doing: str) -> str:
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


def _asked(ask: Callable[[], Any]) -> Any:
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
