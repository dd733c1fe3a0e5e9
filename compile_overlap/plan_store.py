"""Tuned plans and measured costs on disk, for later processes. A file is data: checked, never executed or trusted.

One file holds one value and the whole key for which it was found, and is named by the key's digest. It is replaced
whole, so that readers and several writers at once see one of the versions. What cannot be read is ignored with one
notice.

The folder is `A2A_FFN_PLANS`, or `compile-overlap` in the user's cache (`$XDG_CACHE_HOME`, `~/.cache`); nothing is read
or written with `A2A_FFN_PLANS=off`. Only the first rank of a group reads and writes (`known_plans`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, TypeVar

from . import notice
from .config import COSTS_RANGE, PLANS, are_sound
from .costs import Costs
from .layout import require
from .plan_json import LARGEST, as_json, from_json, parsed
from .schedule import Plan

VERSION = 1
ABANDONED_S = 3600  # a file that is still being written after so long never will be
OFF = "off"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Tuned:
    """A plan found by timing, the slowest rank's median seconds of it and the unchunked one, and when (Unix time)."""

    plan: Plan
    seconds: float
    unchunked_seconds: float
    created: int

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": as_json(self.plan)}

    @classmethod
    def from_json(cls, value: Any) -> Tuned:
        """What `as_json` gave. Raises ValueError."""
        numbers = _positive(value, ("seconds", "unchunked_seconds", "created"), ("plan",))
        return cls(from_json(value["plan"]), numbers[0], numbers[1], int(numbers[2]))


@dataclass(frozen=True)
class Measured:
    """Costs that a group measured, and when (Unix time)."""

    costs: Costs
    created: int

    def as_json(self) -> dict[str, Any]:
        return {**self.costs._asdict(), "created": self.created}

    @classmethod
    def from_json(cls, value: Any) -> Measured:
        """What `as_json` gave. Raises ValueError."""
        *costs, created = _positive(value, (*Costs._fields, "created"))
        require(are_sound(Costs(*costs)), "costs", costs, COSTS_RANGE)
        return cls(Costs(*costs), int(created))


def _positive(value: Any, names: tuple[str, ...], others: tuple[str, ...] = ()) -> list[float]:
    """The named numbers of an object that has these fields. Raises ValueError unless all are positive and finite."""
    if not isinstance(value, dict) or set(value) != {*names, *others}:
        raise ValueError(f"value = {str(value)[:200]}: must be an object of {', '.join((*names, *others))}")
    for name in names:
        fits = type(value[name]) in (int, float) and 0 < value[name] < 1e30
        require(fits, name, str(value[name])[:40], "a positive number")
    return [value[name] for name in names]


def folder() -> Path | None:
    """Where the files are; None where nothing is kept. Raises ValueError where `A2A_FFN_PLANS` names something else."""
    text = os.environ.get(PLANS) or None
    if text == OFF:
        return None
    if text is not None:
        try:
            place = Path(text).expanduser()
            fits = place.is_dir() or not place.exists()
        except (OSError, RuntimeError) as error:  # no such user, a name that is too long, no permission to look
            raise ValueError(f"{PLANS} = {text}: must be a folder, or {OFF}, but {error}") from error
        require(fits, PLANS, text, f"a folder, or {OFF}")
        return place
    cache = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "compile-overlap"
    return None


def path_of(kind: str, key: dict[str, Any]) -> Path | None:
    """The file of a key; None where nothing is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    place = folder()
    return None if place is None else place / f"{kind}-{digest}.json"


def read(kind: str, key: dict[str, Any], from_json: Callable[[Any], Value]) -> Value | None:
    """What is kept for a key, as `from_json` makes it from JSON's types; None where nothing is, or it is unfit."""
    place = path_of(kind, key)
    if place is None:
        return None
    try:
        return from_json(_value(parsed(_text(place)), kind, key))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notice.warn_once(f"ignoring {place}: {error}")
        return None


def _text(place: Path) -> str:
    """A regular file's text. Not waiting: another file by this name may be a pipe, which nobody writes to."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is not a file")
    with open(descriptor, encoding="utf-8") as file:
        return file.read(LARGEST + 1)


def _value(content: Any, kind: str, key: dict[str, Any]) -> Any:
    if not isinstance(content, dict) or set(content) != {"kind", "version", "key", "value"}:
        raise ValueError("is no file of compile_overlap's plans")
    version = content["version"]
    require(type(version) is int and version == VERSION, "version", str(version)[:40], str(VERSION))
    if content["kind"] != kind or content["key"] != key:
        raise ValueError("is of another configuration than its name says")
    return content["value"]


def write(kind: str, key: dict[str, Any], value: dict[str, Any]) -> Path | None:
    """Keep the value for a key; the file, or None where nothing is kept. What the disk refuses is said once."""
    place = path_of(kind, key)
    if place is None:
        return None
    text = json.dumps({"kind": kind, "version": VERSION, "key": key, "value": value}, indent=1, allow_nan=False)
    part = place.with_name(f"{place.stem}-{uuid.uuid4().hex}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear(place.parent)
        with open(part, "x") as file:
            file.write(text + "\n")
        os.replace(part, place)
    except OSError as error:
        notice.warn_once(f"{place} cannot be written: {error}")
        with contextlib.suppress(OSError):
            part.unlink()
        return None
    return place


def _clear(place: Path) -> None:
    """Remove what writers that were killed have left in this folder."""
    for part in place.glob("*.part"):
        with contextlib.suppress(OSError):  # another writer has cleared it, or put it in its place
            if time.time() - part.stat().st_mtime > ABANDONED_S:
                part.unlink()
