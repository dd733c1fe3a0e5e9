"""What the ranks of a group write for each other, in the store through which the group was made.

A rank may handle its error and go on, and the others may never notice. So what a rank failed in alone changes nothing
for them by itself: only those that wait for it to agree are told, and their calls fail as its own did. Whom they wait for
in vain is seen from where it was, which every rank counts alike (`Place`):

    it failed before the exchange of the very call they are in    at once
    it failed later than their last call: it may still come       after ten seconds, or the group's timeout
    it failed in an earlier call, which they are past             not at all: it has gone on
    an exchange of the group failed, or a rank came too late      at once; from then on all ranks count anew
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any, Callable, Iterable, NamedTuple

import torch.distributed as dist

from . import compat

GRACE_S = 10  # how long a rank whose exchange failed waits for the others' words, unless the group's timeout is shorter
_SLOWEST_POLL_S, _MARGIN_S = 0.05, 1.0


class Place(NamedTuple):
    """Where a rank is since the group last failed: how often it has agreed with the others, how many calls with exchanges
    it has begun since then, and how many have failed since then before they began."""

    agreed: int = 0
    calls: int = 0
    tries: int = 0


class Word(NamedTuple):
    """What a rank whose call failed writes. `count`: which failure of the group it is, or would be; `place`: where it was;
    `alone`: by itself, not since others did not come; `outcome`: what it means for the others, one of those below.
    """

    count: int
    place: Place
    alone: bool
    outcome: str
    doing: str
    error: str

    def is_since(self, place: Place) -> bool:
        return self.outcome == OF_GROUP or tuple(self.place) >= place


OF_GROUP, OF_CALL, OF_STEP = "the group has failed", "its call failed before the exchange", "it may still come"


class Board:
    """What the ranks of one group write for each other. `ranks`: their numbers in the job; `own`: this one's.

    All ranks make it at the same point, before anything can fail: a store may outlive a group, and the boards of its
    groups are told apart by counting them.
    """

    def __init__(self, group: Any):
        self._store = compat.store_of(group)
        self.ranks, self.own = dist.get_process_group_ranks(group), dist.get_rank()
        self.timeout_s = compat.timeout_s(group)
        number = bounded(self.grace_s, lambda: self._store.add(f"compile_overlap/boards/{self.own}", 1))
        self._name = f"compile_overlap/{number}"
        self.failed, self.place = 0, Place()
        self._proposed, self._has_word = "", False
        self.known: dict[Any, None] = {}

    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.own]

    def propose(self, text: str) -> tuple[dict[int, str], list[int], str]:
        """What each rank proposes; or what those do that came, the ranks that did not, and the `outcome` of that."""
        name = f"{self._name}/proposals/{self.failed}/{self.place.agreed}/{self.place.tries}"
        wait = _Wait(self, {rank: f"{name}/{rank}" for rank in self.ranks})

        def exchange():
            own = wait.keys[self.own]
            self._store.set(own, text)
            found = self._await(wait.keys, time.monotonic() + self.timeout_s, wait.is_in_vain)
            missing = [] if len(found) == len(self.ranks) else self._missing(wait.keys)
            if missing:
                self._store.set(own, "")  # a later call may propose by this name
            else:
                self._all_came(own)
            return found, missing, wait.outcome

        return bounded(self.timeout_s + GRACE_S, exchange)

    def _missing(self, keys: dict[int, str]) -> list[int]:
        """The ranks that have not come; if all have, but some too early or too late for the others, all others."""
        return [rank for rank, key in keys.items() if not self._store.check([key])] or self.others()

    def _all_came(self, proposed: str) -> None:
        """So all have read this rank's proposal before this one, and what it failed in before is over."""
        if self._proposed:
            self._store.delete_key(self._proposed)
        if self._has_word:
            self._store.set(f"{self._name}/words/{self.own}", "")
        self._proposed, self._has_word = proposed, False
        self.place = Place(self.place.agreed + 1)

    def begin(self) -> None:
        """A call's exchanges are about to begin."""
        self.place = Place(self.place.agreed, self.place.calls + 1)

    def part(self, name: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have read what `name` is about: the process that ends then may be the store's."""
        keys = {rank: f"{self._name}/read/{name}/{rank}" for rank in (*ranks, self.own)}

        def wait():
            self._store.set(keys[self.own], "read")
            self._await(keys, time.monotonic() + self.grace_s)

        with contextlib.suppress(RuntimeError, TimeoutError):  # then the store is gone, and nobody can read
            bounded(self.grace_s + _MARGIN_S, wait)

    def tell(self, word: Word) -> None:
        """Write this rank's word, and take it that the call, or the group, has failed."""
        self._has_word = True
        if word.outcome == OF_GROUP:
            self.failed, self.place = word.count, Place()
        elif word.outcome == OF_CALL:
            self.place = self.place._replace(tries=self.place.tries + 1)

        def write():
            self._store.set(f"{self._name}/words/{self.own}", json.dumps(word))
            self._store.set(f"{self._name}/failures/{word.count}", "")

        bounded(self.grace_s + _MARGIN_S, write)

    def answers(self, told: Word) -> dict[int, Word]:
        """What the other ranks say about the failure of which this one has told, as far as they do in time."""
        since = told.place if told.outcome == OF_CALL else Place()
        deadline = time.monotonic() + self.grace_s

        def read():
            while True:
                found = self.words(told.count, since)
                if len(found) == len(self.ranks) - 1 or time.monotonic() > deadline:
                    return found
                time.sleep(_SLOWEST_POLL_S)

        return bounded(self.grace_s + _MARGIN_S, read)

    def words(self, count: int, since: Place) -> dict[int, Word]:
        """What other ranks have written about this failure of the group from this place on, or about a later failure."""
        if not self._store.check([f"{self._name}/failures/{count}"]):
            return {}
        texts = self.read({rank: f"{self._name}/words/{rank}" for rank in self.others()})
        found = {rank: Word(*json.loads(text)) for rank, text in texts.items()}
        return {rank: word for rank, word in found.items() if word.count >= count and word.is_since(since)}

    @property
    def grace_s(self) -> float:
        return min(GRACE_S, self.timeout_s)

    def _await(
        self, keys: dict[int, str], deadline: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[int, str]:
        """The texts under these keys, of those that are written before the deadline, or before `stop()`."""
        pause = 1e-3
        while True:
            every = self._store.check(list(keys.values()))
            found = self.read(keys) if every else {}
            if len(found) == len(keys):
                return found
            if time.monotonic() > deadline or stop():
                return self.read(keys)
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)

    def read(self, keys: dict[int, str]) -> dict[int, str]:
        """The texts under these keys, of those that are written and have not been emptied.

        Not deleted: to get a key that is gone would wait for it.
        """
        texts = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return {rank: text for rank, text in texts.items() if text}


class _Wait:
    """A wait for the proposals under `keys`; `outcome`: what it is if some do not come."""

    def __init__(self, board: Board, keys: dict[int, str]):
        self.board, self.keys, self.outcome = board, keys, OF_GROUP
        self._patient_until: float | None = None

    def is_in_vain(self) -> bool:
        """Whether a rank will not come, as its word says."""
        words = self.board.words(self.board.failed + 1, self.board.place)
        if any(word.outcome == OF_GROUP for word in words.values()):
            return True
        missing = {word.outcome for rank, word in words.items() if not self.board.read({rank: self.keys[rank]})}
        if OF_STEP in missing and self._patient_until is None:
            self._patient_until = time.monotonic() + self.board.grace_s
        if OF_CALL in missing or (OF_STEP in missing and time.monotonic() > self._patient_until):
            self.outcome = OF_CALL
            return True
        return False


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
