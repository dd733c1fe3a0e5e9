"""What a user should know is said once: falling back by the group's first rank, what the compiler met by every rank."""

from __future__ import annotations

import logging

log = logging.getLogger("compile_overlap")
_SAID: set[str] = set()


class Delegated(RuntimeError):
    """`A2A_FFN_STRICT=1` and the layer would have delegated to the reference, or to the collectives."""


def warn_once(text: str) -> None:
    """Log a warning, unless the same text was logged before."""
    if text not in _SAID:
        log.warning("%s", text)
    _SAID.add(text)


def fall_back(reason: str, *, strict: bool, rank: int) -> None:
    """Say once that exchanges go through collectives, not the peers' memory, and why; with `strict` raise."""
    text = f"exchanging by collectives, not through the peers' memory: {reason}"
    if strict:
        raise Delegated(text)
    if rank == 0:
        warn_once(text)


def delegate(reason: str, *, strict: bool, rank: int) -> None:
    """Say once that the reference `none` answers, and why; with `strict` raise `Delegated` instead."""
    if strict:
        raise Delegated(f"the overlapped layer does not take this call: {reason}")
    if rank == 0 and reason not in _SAID:
        log.warning("running the reference overlap='none' instead of the overlapped layer: %s", reason)
    _SAID.add(reason)
