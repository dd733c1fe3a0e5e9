"""A plan as JSON: what a file of tuned plans and a record hold. Reading checks every value and executes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from .schedule import Plan

VERSION = 1
LARGEST = 1 << 16  # characters
_MOST = 1 << 16


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan's fields and the version of this form, of JSON's types alone."""
    return {"version": VERSION, **json.loads(json.dumps(asdict(plan)))}


def dumps(plan: Plan) -> str:
    """The plan as one line of JSON, which `loads` reads."""
    return json.dumps(as_json(plan))


def loads(text: str) -> Plan:
    """The plan that `dumps` wrote. Raises ValueError for any other text."""
    return from_json(parsed(text))


def parsed(text: str) -> Any:
    """A JSON text's value. Raises ValueError for what is none, is above 64 Ki characters, or nested too deeply."""
    if len(text) > LARGEST:
        raise ValueError(f"{len(text)} characters: must be at most {LARGEST}")
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("is nested too deeply for a plan") from None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant}: must be a finite number")


def from_json(value: Any) -> Plan:
    """The plan that `as_json` gave. Raises ValueError naming the field, its value and what is allowed."""
    names = ["version", *(field.name for field in fields(Plan))]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"plan = {str(value)[:200]}: must be an object of {', '.join(names)}")
    if type(value["version"]) is not int or value["version"] != VERSION:
        raise ValueError(f"version = {str(value['version'])[:40]}: must be {VERSION}")
    for field in fields(Plan):
        fits, allowed = _TYPES[field.type]
        if not fits(value[field.name]):
            raise ValueError(f"{field.name} = {str(value[field.name])[:200]}: must be {allowed}")
    read = {field.name: value[field.name] for field in fields(Plan)}
    plan = Plan(**{name: tuple(each) if isinstance(each, list) else each for name, each in read.items()})
    if not plan.sizes or min(plan.sizes) < 1 or plan.ratio_16ths < 1 or plan.ahead < 1:
        raise ValueError(f"plan = {plan}: must be chunks of a token or more, ratio and in-flight budget of at least 1")
    parts = plan.own_first + (plan.head > 0)
    if parts > plan.peers or Plan.parse(str(plan)) != plan:
        raise ValueError(f"plan = {plan}: must be one that its text says; own-first or head, not both, go with peers")
    return plan


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_list(of: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is of for each in value)


_TYPES = {
    "int": (_is_count, f"a count of at most {_MOST}"),
    "bool": (lambda value: type(value) is bool, "true or false"),
    "tuple[int, ...]": (lambda value: _is_list(int, value) and all(map(_is_count, value)), "a list of counts"),
    "tuple[str, ...]": (lambda value: _is_list(str, value), "a list of names"),
}
