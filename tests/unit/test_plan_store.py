"""Plans as JSON, and the files in which tuned plans and costs are kept: what is read is data, and may be anything."""

import itertools
import json
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_overlap import notice, plan_json, plan_store
from compile_overlap.config import Settings
from compile_overlap.costs import Costs
from compile_overlap.known_plans import Problem, check
from compile_overlap.layout import Layout
from compile_overlap.plan import make_plan
from compile_overlap.plan_store import Measured, Tuned
from compile_overlap.schedule import Plan

CPU = torch.device("cpu")
TUNED = Tuned(Plan((2, 4, 2)), 1.25e-3, 1.5e-3, 1_700_000_000)
KEY = {"layout": [2, 4], "device": "here"}
NAMES = st.lists(st.sampled_from(("forward", "backward", "norm1024x8")), unique=True).map(tuple)
PASSES = st.lists(st.sampled_from(("reorder", "pin-order")), unique=True).map(tuple)


@st.composite
def plans(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 64), min_size=1, max_size=9)))
    peers = draw(st.booleans())
    own_first = peers and draw(st.booleans())
    head = draw(st.integers(0, 64)) if peers and not own_first else 0
    numbers = (draw(st.integers(low, 1024)) for low in (1, 1, 0, 0))
    return Plan(sizes, *numbers, peers, own_first, head, draw(NAMES), draw(PASSES))


@given(plans())
def test_a_plan_is_read_as_it_was_written(plan):
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert "\n" not in plan_json.dumps(plan) and Plan.parse(str(plan)) == plan


def _with(**changes):
    return {**plan_json.as_json(TUNED.plan), **changes}


@pytest.mark.parametrize("value", [
    None, [], "8,8 r4 a2 b1 s0", {}, {"version": 1}, _with(version=2), _with(version=True), _with(version="1"),
    _with(more=1), _with(sizes=[]), _with(sizes=[2, 0]), _with(sizes=[2, -1]), _with(sizes=[2.0]),
    _with(sizes=[True, 2]), _with(sizes="8"),
    _with(sizes=[1 << 40]), _with(ratio_16ths=0), _with(ahead=0), _with(backlog=-1), _with(reserved_sms=None),
    _with(reserved_sms=10**400), _with(peers=1), _with(own_first=True), _with(head=2), _with(peers=True, own_first=True, head=2),
    _with(triton=["a b"]), _with(triton=[3]),
    _with(disabled=["x]:other group"]), _with(disabled=["__import__('os')"]), _with(disabled=[""]),
], ids=lambda value: str(value)[-60:])  # fmt: skip
def test_from_json_rejects(value):
    with pytest.raises(ValueError, match="must be"):
        plan_json.from_json(value)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 50_000, "9" * 5000, " " * (1 << 17)])
def test_loads_rejects(text):
    with pytest.raises(ValueError):
        plan_json.loads(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("A2A_FFN_PLANS", str(tmp_path / "plans"))
    monkeypatch.setattr(notice, "_SAID", set())
    return tmp_path / "plans"


@pytest.mark.parametrize("value", [TUNED, Measured(Costs(6e-5, 2.4e10, 5.6e14), 1_700_000_000)])
def test_what_is_kept_is_found_by_its_key_alone(folder, value):
    assert plan_store.read("plan", KEY, type(value).from_json) is None
    path = plan_store.write("plan", KEY, value.as_json())
    assert path.parent == folder and plan_store.read("plan", KEY, type(value).from_json) == value
    for kind, key in (("costs", KEY), ("plan", {**KEY, "device": "elsewhere"})):
        assert plan_store.read(kind, key, type(value).from_json) is None
    assert os.listdir(folder) == [path.name]


def _another(**changes):
    content = {"kind": "plan", "version": 1, "key": KEY, "value": TUNED.as_json()}
    return json.dumps({**content, **changes}).encode()


HOSTILE = {
    "truncated": _another()[:-20],
    "empty": b"",
    "other version": _another(version=2),
    "no version": _another(version=True),
    "other kind": _another(kind="costs"),
    "other key": _another(key={**KEY, "device": "elsewhere"}),
    "another field": _another(more=1),
    "no plan": _another(value={"seconds": 1.0}),
    "no time": _another(value={**TUNED.as_json(), "seconds": float("nan")}),
    "no number": _another(value={**TUNED.as_json(), "seconds": "1"}),
    "too large a number": _another(value={**TUNED.as_json(), "created": 10**400}),
    "foreign": b'["not", "ours"]',
    "binary": bytes(range(256)),
    "a pickle": b"cos\nsystem\n(S'exit 9'\ntR.",
    "too long": _another() + b" " * (1 << 17),
    "too deep": b'{"a":' * 20_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_unfit_file_is_ignored_with_one_notice(folder, caplog, content):
    path = plan_store.write("plan", KEY, TUNED.as_json())
    path.write_bytes(content)
    for _ in range(2):
        assert plan_store.read("plan", KEY, Tuned.from_json) is None
    assert caplog.text.count(f"ignoring {path}") == 1
    plan_store.write("plan", KEY, TUNED.as_json())
    assert plan_store.read("plan", KEY, Tuned.from_json) == TUNED


@pytest.mark.parametrize("costs", [
    (1e-5, 1e-310, 1e12), (1e29, 1e29, 1e29), (1e-5, 1e9, 5e-324), (1e-16, 1e9, 1e12), (1e4, 1e9, 1e12), (1e-5, 1e19, 1e12),
])  # fmt: skip
def test_costs_that_no_plan_can_be_made_with_are_ignored(folder, caplog, costs):
    plan_store.write("costs", KEY, Measured(Costs(*costs), 1_700_000_000).as_json())
    assert plan_store.read("costs", KEY, Measured.from_json) is None
    assert "must be three positive numbers" in caplog.text


@pytest.mark.parametrize("costs", itertools.product((1.1e-15, 0.9e3), (1.1, 0.9e18), (1.1e3, 0.9e21)))
def test_plans_are_made_with_the_most_extreme_costs(folder, costs):
    plan_store.write("costs", KEY, Measured(Costs(*costs), 1_700_000_000).as_json())
    read = plan_store.read("costs", KEY, Measured.from_json)
    assert sum(make_plan(Layout(2, 8, 16, 64, 128), 2, "cuda", True, Settings(), read.costs).sizes) == 8


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(folder, caplog, make):
    folder.mkdir()
    make(plan_store.path_of("plan", KEY))
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert plan_store.read("plan", KEY, Tuned.from_json) is None
    assert caplog.text.count("ignoring") == 1 and len(os.listdir("/proc/self/fd")) == handles


def test_files_are_as_readable_as_others_and_abandoned_ones_are_removed(folder):
    folder.mkdir()
    for name, age in (("old.part", plan_store.ABANDONED_S + 60), ("new.part", 0), ("old.json", 1e6)):
        (folder / name).touch()
        os.utime(folder / name, times=(time.time() - age,) * 2)
    usual = os.umask(0o027)
    path = plan_store.write("plan", KEY, TUNED.as_json())
    os.umask(usual)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(folder)) == ["new.part", "old.json", path.name]


def test_a_write_that_fails_leaves_what_was_there(folder, caplog, monkeypatch):
    path = plan_store.write("plan", KEY, TUNED.as_json())

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert plan_store.write("plan", KEY, replace(TUNED, seconds=1e-3).as_json()) is None
    assert os.listdir(folder) == [path.name] and "no space left" in caplog.text
    assert plan_store.read("plan", KEY, Tuned.from_json) == TUNED


def test_writers_at_once_leave_one_whole_value_at_any_time(folder):
    values = [replace(TUNED, created=1 + index) for index in range(4)]
    plan_store.write("plan", KEY, values[0].as_json())
    threads = [
        threading.Thread(target=lambda value=value: [plan_store.write("plan", KEY, value.as_json()) for _ in range(40)])
        for value in values
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert plan_store.read("plan", KEY, Tuned.from_json) in values
    assert len(os.listdir(folder)) == 1


def test_where_the_files_are(monkeypatch, tmp_path):
    monkeypatch.setenv("A2A_FFN_PLANS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_store.folder() == tmp_path / "compile-overlap"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(plan_store.folder()) == "/home/somebody/.cache/compile-overlap"
    monkeypatch.setenv("A2A_FFN_PLANS", "off")
    assert plan_store.folder() is None and plan_store.write("plan", KEY, TUNED.as_json()) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("A2A_FFN_PLANS", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="A2A_FFN_PLANS = .*file: must be a folder, or off"):
        plan_store.read("plan", KEY, Tuned.from_json)
    for text in ("~nosuchuser/x", "x" * 300):
        monkeypatch.setenv("A2A_FFN_PLANS", text)
        with pytest.raises(ValueError, match="A2A_FFN_PLANS = .*: must be a folder, or off, but"):
            plan_store.read("plan", KEY, Tuned.from_json)


def _problem(**settings):
    return Problem(Layout(2, 8, 16, 64, 128), torch.bfloat16, False, "inductor", "add", 1, Settings(**settings))


def test_a_problem_is_described_without_what_does_not_bear_on_a_plan():
    described = _problem(strict=True, recipe="inductor", in_flight=3).described()
    assert described == _problem(in_flight=3).described() and described["settings"] == {"in_flight": "3"}
    assert json.loads(json.dumps(described)) == described and "rank" not in json.dumps(described)
    assert _problem(strict=True).key == _problem().key != _problem(in_flight=3).key


@pytest.mark.parametrize("tuned, settings, rule", [
    (Plan((2, 4)), {}, "sum to L = 8"), (Plan((1, 7)), {}, "of 2 tokens or more"),
    (Plan((4, 4), reserved_sms=4), {}, "at most 0 SMs"),
    (Plan((4, 4), ahead=1), {"in_flight": 2}, "one of the settings"),
    (Plan((4, 4), peers=True), {"transport": "collectives"}, "one of the settings"),
    (Plan((8,), peers=True, own_first=True), {}, "one of the settings"),
    (Plan((8,), peers=True, head=2), {"head": 0}, "one of the settings"),
    (Plan((8,), reserved_sms=0), {"reserved_sms": 4}, "one of the settings"),
    (Plan((8,), triton=("forward",)), {}, "names no kernels"),
    (Plan((8,), disabled=("reorder",)), {}, "names no kernels"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(tuned, settings, rule):
    with pytest.raises(ValueError, match=rule):
        check(tuned, _problem(**settings), CPU)


def test_borders_inside_a_vector_step_are_refused_on_cpu():
    odd = _problem()._replace(layout=Layout(2, 1, 16, 64, 24))
    check(Plan((4, 4)), odd, CPU)
    with pytest.raises(ValueError, match="multiples of 4"):
        check(Plan((2, 6)), odd, CPU)
