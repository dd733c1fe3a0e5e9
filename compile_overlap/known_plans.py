"""What a group knows about its plans and costs without measuring: tuned in this process, or kept by its first rank.

At the first question about something the group's first rank looks it up on its disk, and its answer goes to all ranks
before anything else is decided; from then on every rank has it in memory. So ranks with other disks, or with none,
agree, and a rank may ask again alone. Keys hold what a measurement depends on, and no rank.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import time
import weakref
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist

from . import group as groups
from . import plan, plan_store, rooms
from .config import PEERS, Settings
from .costs import costs_of
from .kernels import sm_count
from .layout import Layout
from .plan_store import Measured, Tuned
from .schedule import Plan

PLAN, COSTS = "plan", "costs"


class Problem(NamedTuple):
    """What a plan is tuned for, beside the group and its machines; alike on all ranks."""

    layout: Layout
    dtype: torch.dtype
    training: bool
    recipe: str
    bias: str
    comm_scale: int
    settings: Settings

    @property
    def key(self) -> Problem:
        """The problem without the settings that do not bear on a plan, or are another field's."""
        return self._replace(settings=replace(self.settings, recipe=None, bias=None, strict=False))

    def described(self) -> dict[str, Any]:
        """The problem in JSON's types, with the settings that are not left to the plan."""
        default, settings = vars(Settings()), vars(self.key.settings)
        asked = {name: str(value) for name, value in settings.items() if value != default[name]}
        return {
            "layout": asdict(self.layout), "dtype": str(self.dtype), "training": self.training, "recipe": self.recipe,
            "bias": self.bias, "comm_scale": self.comm_scale, "settings": asked,
        }  # fmt: skip


class Known(NamedTuple):
    """A value, and whether it is from a file rather than from this process."""

    value: Any
    stored: bool


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Known | None]] = weakref.WeakKeyDictionary()


def tuned_plan(group: Any, device: torch.device, problem: Problem) -> Known | None:
    """The `Tuned` plan that is known for a problem; None where none is. All ranks of the group ask the first time.

    Raises ValueError on all ranks where the first one's `A2A_FFN_PLANS` is unfit.
    """
    if problem.layout.P == 1 or problem.settings.sizes or problem.settings.chunks:
        return None

    def checked(value):
        tuned = Tuned.from_json(value)
        check(tuned.plan, problem, device)
        return tuned

    def look_up(place):
        return plan_store.read(PLAN, {**problem.described(), **place}, checked)

    return _known(group, problem.layout.P, device, (PLAN, problem.key), look_up, Tuned.from_json)


def check(tuned: Plan, problem: Problem, device: torch.device) -> None:
    """Raise ValueError unless a plan fits the layout, the device and the settings: what it says is not our own word."""
    layout, settings, sizes = problem.layout, problem.settings, tuned.sizes
    quantum = plan.border_quantum(device.type, layout.rows, layout.H)
    most = sm_count(device) - 1 if device.type == "cuda" else 0
    fits = {
        f"its chunks sum to L = {layout.L}, of {plan.MIN_TOKENS} tokens or more": sum(sizes) == layout.L
        and min(sizes) >= min(plan.MIN_TOKENS, layout.L),
        f"its borders are multiples of {quantum}": all(size % quantum == 0 for size in sizes[:-1]),
        f"at most {most} SMs are reserved": tuned.reserved_sms <= most or tuned.reserved_sms == settings.reserved_sms,
        "it is one of the settings": settings.in_flight in (None, tuned.ahead)
        and settings.reserved_sms in (None, tuned.reserved_sms)
        and not (tuned.peers and settings.transport not in (None, PEERS))
        and tuned.own_first <= settings.own_first
        and (not tuned.peers or settings.head in (None, tuned.head)),
        "it names no kernels and passes": not tuned.triton and not tuned.disabled,
    }
    wrong = [rule for rule, holds in fits.items() if not holds]
    if wrong:
        raise ValueError(f"plan = {tuned}: must be such that {wrong[0]}")


def check_folder(group: Any, device: torch.device) -> None:
    """Raise ValueError on all ranks, which all ask, where the first one's `A2A_FFN_PLANS` is unfit to keep a plan in."""

    def look():
        plan_store.folder()

    groups.from_first(group, device, look)


def keep(group: Any, device: torch.device, problem: Problem, tuned: Tuned) -> str | None:
    """Take this plan for the problem from now on, on all ranks, and keep it: the first rank's file, or None."""
    place = _place(group, problem.layout.P, device)

    def write():
        path = plan_store.write(PLAN, {**problem.described(), **place}, tuned.as_json())
        return None if path is None else str(path)

    _remember(group, (PLAN, problem.key), Known(tuned, stored=False))
    return groups.from_first(group, device, write)


def costs(group: Any, P: int, device: torch.device, dtype: torch.dtype) -> Known | None:
    """The `Measured` costs of this group: the first rank's, or measured now; None where none are (see `costs_of`)."""
    if P == 1 or dist.get_backend(group) != "nccl":
        return None
    key = {"dtype": str(dtype)}

    def look_up(place):
        return plan_store.read(COSTS, {**key, **place}, Measured.from_json)

    known = _known(group, P, device, (COSTS, dtype), look_up, Measured.from_json)
    if known is None:
        known = Known(Measured(costs_of(group, P, device, dtype), int(time.time())), stored=False)
        _remember(group, (COSTS, dtype), known)
        if dist.get_rank(group) == 0:
            plan_store.write(COSTS, {**key, **_place(group, P, device)}, known.value.as_json())
    return known


def reset() -> None:
    """Forget what is known in this process; files stay."""
    _KNOWN.clear()


def _answers(group: Any) -> dict[Any, Known | None]:
    return _KNOWN.setdefault(dist.group.WORLD if group is None else group, {})


def _remember(group: Any, about: Any, known: Known) -> None:
    _answers(group)[about] = known


def _known(
    group: Any, P: int, device: torch.device, about: Any, look_up: Callable[[dict], Any],
    from_json: Callable[[Any], Any],
) -> Known | None:  # fmt: skip
    """What is known about something; the first time what `look_up` finds on the first rank's disk for its place."""
    answers = _answers(group)
    if about not in answers:
        place = _place(group, P, device)

        def found():
            value = look_up(place)
            return None if value is None else value.as_json()

        value = groups.from_first(group, device, found)
        answers[about] = None if value is None else Known(from_json(value), stored=True)
    return answers[about]


_HOSTS: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def _place(group: Any, P: int, device: torch.device) -> dict[str, Any]:
    """Where a measurement holds: device, versions, code, which ranks share a host, and what decides the link."""
    member = dist.group.WORLD if group is None else group
    if member not in _HOSTS:
        hosts = groups.gathered(group, P, device, rooms.host())
        _HOSTS[member] = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    cuda, cpu = device.type == "cuda", f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu,
        "torch": torch.__version__, "triton": _version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "backend": dist.get_backend(group), "hosts": _HOSTS[member], "link": _link(), "code": _code(),
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _link() -> dict[str, str]:
    """NCCL's and gloo's settings: they choose the link, NVLink or a network, and how it is used."""
    names = (name for name in os.environ if name.startswith(("NCCL_", "GLOO_")) and not name.startswith("NCCL_DEBUG"))
    return {name: os.environ[name] for name in sorted(names)}


@functools.lru_cache(maxsize=None)
def _code() -> str:
    """A digest of this package's and the passes' sources: other code is as fast as its own measurement says."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for name in ("compile_overlap", "passes"):
        for source in sorted((root / name).rglob("*.py")):
            digest.update(f"{source.relative_to(root)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]
