"""Settings from the environment. They must be the same on every rank; the group checks that when a layout is compiled.

| variable           | value                                  | meaning                                                |
| ------------------ | -------------------------------------- | ------------------------------------------------------ |
| `A2A_FFN_CHUNKS`   | a count, or sizes such as `2,14,16`    | chunks along L (default: by the plan; one at P=1)      |
| `A2A_FFN_RECIPE`   | `eager_exact`, `inductor`              | numeric recipe (default: the one that equals `none`)   |
| `A2A_FFN_BIAS`     | `add`, `baddbmm`                       | bias form (default: the one that equals `none`)        |
| `A2A_FFN_GRADIENTS` | `exact`, `fast`                       | every gradient eager's bit for bit (default on CPU), or fused |
| `A2A_FFN_IN_FLIGHT` | a count                               | chunks dispatched beyond the one computed (default: 2) |
| `A2A_FFN_RESERVED_SMS` | a count                            | SMs that GEMMs leave to the exchanges (default: by the link) |
| `A2A_FFN_TRANSPORT` | `collectives`, `peers`               | NCCL, or the peers' memory (default: that among GPUs of one host, where they can) |
| `A2A_FFN_RANKS_PER_HOST` | a count                       | pretend that so many consecutive ranks make a host, to try several on one (default: found) |
| `A2A_FFN_OWN_FIRST` | `0`, `1`                              | through the peers' memory, begin with a rank's own rows (default: 0) |
| `A2A_FFN_HEAD`     | a count of tokens                      | through the peers' memory, dispatch so many before the others; 0: all at once (default: by the plan) |
| `A2A_FFN_GEMMS`    | `cublas`, `measured`                   | or our own kernel where it is faster (default: measured) |
| `A2A_FFN_NORM`     | `inductor`, `triton`                   | Inductor's gated norm, or our kernel where it equals it (default: triton) |
| `A2A_FFN_COSTS`    | `us,GB/s,TFLOP/s`                      | latency, link and GEMM rate to plan with (default: measured on NCCL groups) |
| `A2A_FFN_DISABLE_PASSES` | names, or `all`                  | passes to switch off, for ablation                     |
| `A2A_FFN_STRICT`   | `0`, `1`                               | 1: `notice.Delegated` instead of delegating, an error where the wrapper leaves the schedule |

`A2A_FFN_PLANS`, a folder or `off`, is where tuned plans and measured costs are kept (`plan_store`): the first rank's alone
counts, and ranks may have different ones.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from . import compat, notice
from .layout import require
from .costs import Costs
from .recipes import BIAS_FORMS, INDUCTOR, RECIPES
from .schedule import MIN_TOKENS


PEERS = "peers"
CUBLAS = "cublas"
PREFIX, PLUGIN, PLANS = "A2A_FFN_", "A2A_FFN_KERNEL_PLUGIN", "A2A_FFN_PLANS"
VARIABLES = (
    "A2A_FFN_CHUNKS", "A2A_FFN_RECIPE", "A2A_FFN_BIAS", "A2A_FFN_GRADIENTS", "A2A_FFN_IN_FLIGHT",
    "A2A_FFN_RESERVED_SMS", "A2A_FFN_TRANSPORT", "A2A_FFN_RANKS_PER_HOST", "A2A_FFN_OWN_FIRST", "A2A_FFN_HEAD",
    "A2A_FFN_GEMMS", "A2A_FFN_NORM", "A2A_FFN_COSTS", "A2A_FFN_DISABLE_PASSES", "A2A_FFN_STRICT",
)  # fmt: skip


def variables() -> tuple[Any, ...]:
    """What `Settings` are read from, in a form that can be compared."""
    return compat.environment(VARIABLES)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; None and the empty tuple leave the choice to the plan."""

    chunks: int | None = None
    sizes: tuple[int, ...] = ()
    recipe: str | None = None
    bias: str | None = None
    gradients: str | None = None
    in_flight: int | None = None
    reserved_sms: int | None = None
    transport: str | None = None
    ranks_per_host: int | None = None
    own_first: bool = False
    head: int | None = None
    gemms: str | None = None
    norm: str | None = None
    costs: Costs | None = None
    disabled_passes: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """Read and check the variables. Raises ValueError; names that mean nothing are warned of, or refused where strict."""
        named = (*VARIABLES, PLUGIN, PLANS)
        unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in named)
        strict = _one_of("A2A_FFN_STRICT", ("0", "1")) == "1"
        text = f"{', '.join(unknown)}: no such setting; there are {', '.join((*VARIABLES, PLANS))}"
        if unknown and strict:
            raise ValueError(text)
        if unknown:
            notice.warn_once(text)
        chunks, sizes = _chunks(os.environ.get("A2A_FFN_CHUNKS", ""))
        return cls(
            chunks=chunks,
            sizes=sizes,
            recipe=_one_of("A2A_FFN_RECIPE", RECIPES),
            bias=_one_of("A2A_FFN_BIAS", BIAS_FORMS),
            gradients=_one_of("A2A_FFN_GRADIENTS", ("exact", "fast")),
            in_flight=_count("A2A_FFN_IN_FLIGHT", 1),
            reserved_sms=_count("A2A_FFN_RESERVED_SMS", 0),
            transport=_one_of("A2A_FFN_TRANSPORT", ("collectives", PEERS)),
            ranks_per_host=_count("A2A_FFN_RANKS_PER_HOST", 1),
            own_first=_one_of("A2A_FFN_OWN_FIRST", ("0", "1")) == "1",
            head=_head("A2A_FFN_HEAD"),
            gemms=_one_of("A2A_FFN_GEMMS", (CUBLAS, "measured")),
            norm=_one_of("A2A_FFN_NORM", (INDUCTOR, "triton")),
            costs=_costs("A2A_FFN_COSTS"),
            disabled_passes=_passes("A2A_FFN_DISABLE_PASSES"),
            strict=strict,
        )


def _one_of(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    require(value is None or value in allowed, name, value, " or ".join(allowed))
    return value


def _chunks(text: str) -> tuple[int | None, tuple[int, ...]]:
    if not text:
        return None, ()
    parts = text.split(",")
    fits = all(re.fullmatch(r"0*[1-9][0-9]{0,5}", part.strip()) for part in parts)
    require(fits, "A2A_FFN_CHUNKS", text, "a positive count, or positive sizes separated by commas")
    numbers = tuple(int(part) for part in parts)
    return (numbers[0], ()) if len(numbers) == 1 else (None, numbers)


def _count(name: str, least: int) -> int | None:
    text = (os.environ.get(name) or "").strip() or None
    fits = text is None or (re.fullmatch("[0-9]{1,6}", text) and int(text) >= least)
    require(fits, name, text, f"a count, from {least} to 999999")
    return None if text is None else int(text)


def _head(name: str) -> int | None:
    count = _count(name, 0)
    fits = count is None or count == 0 or count >= MIN_TOKENS
    require(fits, name, count, f"0, or a count of at least {MIN_TOKENS} tokens, fewer than a chunk's")
    return count


def _costs(name: str) -> Costs | None:
    text = os.environ.get(name) or None
    if text is None:
        return None
    try:
        latency_us, link_gb, gemm_tera = (float(part) for part in text.split(","))
    except ValueError:
        latency_us = link_gb = gemm_tera = 0.0
    costs = Costs(latency_us * 1e-6, link_gb * 1e9, gemm_tera * 1e12)
    require(are_sound(costs), name, text, COSTS_RANGE)
    return costs


def require_divisor(ranks_per_host: int | None, P: int) -> None:
    """Raise ValueError unless hosts of so many ranks make up a group of P; None, and any number for one rank, do."""
    fits = ranks_per_host is None or P == 1 or P % ranks_per_host == 0
    require(fits, "A2A_FFN_RANKS_PER_HOST", ranks_per_host, f"a divisor of the group's ranks, P = {P}")


def check_settings() -> None:
    """Raise ValueError where a setting from the environment is unfit by itself, before anything is made."""
    Settings.from_environment()


COSTS_RANGE = "three positive numbers: us, GB/s, TFLOP/s, each between 1e-9 and 1e9"


def are_sound(costs: Costs) -> bool:
    """Whether a plan can be made with these costs (`COSTS_RANGE`): a file may hold any."""
    values = costs.latency_s * 1e6, costs.bytes_per_s * 1e-9, costs.flops_per_s * 1e-12
    return all(1e-9 < value < 1e9 for value in values)


def _passes(name: str) -> tuple[str, ...]:
    from passes import PASS_NAMES

    text = os.environ.get(name) or ""
    names = PASS_NAMES if text == "all" else tuple(sorted({part.strip() for part in text.split(",")} - {""}))
    require(set(names) <= set(PASS_NAMES), name, text, f"all, or names of {', '.join(PASS_NAMES)}")
    return names
