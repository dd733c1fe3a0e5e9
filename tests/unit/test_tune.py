"""What a tuning decides from the times, what it refuses, and what the benchmark and the planner's judge make of it."""

import argparse
import builtins
import importlib
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from archive_double import ArchiveFFN
from hypothesis import given
from hypothesis import strategies as st
from rankmixer import plugins, record, tuning

import compile_overlap
from compile_overlap.config import Settings
from compile_overlap.layout import Layout
from compile_overlap.schedule import Plan
from compile_overlap.tune import Tuning, _progress, fastest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
judge_planner = importlib.import_module("judge_planner")

WHOLE, HALVES, FOUR = Plan((8,)), Plan((4, 4)), Plan((2, 2, 2, 2))


def _times(median, noise, rounds=20, seed=0):
    source = random.Random(seed)
    return [median * (1 + source.uniform(-noise, noise)) for _ in range(rounds)]


@pytest.mark.parametrize("halves, noise, taken", [
    (1.0, 0.0, WHOLE), (0.995, 0.0, WHOLE), (0.98, 0.001, HALVES), (0.98, 0.3, WHOLE), (0.7, 0.1, HALVES),
    (1.2, 0.1, WHOLE),
])  # fmt: skip
def test_chunks_are_taken_where_they_are_faster_by_more_than_noise(halves, noise, taken):
    measured = {WHOLE: _times(1.0, noise), HALVES: _times(halves, noise, seed=1), FOUR: _times(1.5, noise, seed=2)}
    assert fastest(measured) == taken


@given(st.lists(st.floats(1e-5, 1e-1), min_size=1, max_size=12), st.integers(0, 5))
def test_equal_times_keep_the_unchunked_plan(samples, seed):
    assert fastest({WHOLE: samples, HALVES: list(samples), FOUR: list(samples)}) == WHOLE


def test_drift_that_meets_all_plans_is_not_noise():
    drift = [1 + index / 10 for index in range(20)]
    assert fastest({WHOLE: drift, HALVES: [0.95 * each for each in drift]}) == HALVES


@pytest.mark.parametrize("setting, change, message", [
    ({}, {}, "ffn.ep_group_size = 1: must be at least 2"), ({}, {"most": 0}, "most = 0"),
    ({}, {"rounds": 2.5}, "rounds = 2.5"), ({"A2A_FFN_TRANSPORT": "pigeons"}, {}, "A2A_FFN_TRANSPORT = pigeons"),
])  # fmt: skip
def test_tune_refuses(monkeypatch, setting, change, message):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        compile_overlap.tune(ArchiveFFN(4, 16, 2), torch.zeros(2, 4, 16), **change)


def test_a_tuning_prints_each_plan_and_which_was_taken():
    text = str(Tuning(HALVES, {WHOLE: 2e-3, HALVES: 1e-3}, 20, None))
    assert text.splitlines()[1:] == [
        "      1.0000  4,4 r4 a2 b1 s0, taken", "      2.0000  8 r4 a2 b1 s0, unchunked", "kept in this process only",
    ]  # fmt: skip


@pytest.mark.parametrize("installed", [True, False])
def test_progress_is_the_first_rank_s(monkeypatch, capsys, installed):
    real = builtins.__import__

    def importing(name, *rest):
        if name == "tqdm" and not installed:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)
    for shown in (False, True):
        with _progress(3, shown) as step:
            for _ in range(3):
                step()
        assert bool(capsys.readouterr().err) == shown


def _options(**changes):
    defaults = {"tune": True, "comp_only": False, "backward": False, "no_compile": True}
    return argparse.Namespace(**{**defaults, **changes})


@pytest.mark.parametrize("options, overlaps, ranks, message", [
    (_options(), {"none"}, 2, "needs overlap kernel, not none"), (_options(), {"kernel"}, 1, "at least 2 ranks"),
    (_options(comp_only=True), {"kernel"}, 2, "no comp_only"),
])  # fmt: skip
def test_the_flag_is_refused_where_nothing_can_be_chosen(options, overlaps, ranks, message):
    with pytest.raises(ValueError, match=message):
        tuning.require_tunable(options, overlaps, ranks)
    options.tune = False
    tuning.require_tunable(options, overlaps, ranks)


def test_the_flag_needs_a_plugin_that_can_tune(monkeypatch):
    monkeypatch.setenv(plugins.PLUGIN_VARIABLE, "sequential_plugin")
    with pytest.raises(ValueError, match="must define tune"):
        tuning.require_tunable(_options(), {"kernel"}, 2)


@pytest.mark.parametrize("backward", [False, True])
def test_the_workload_s_layer_is_tuned_as_it_is_called(monkeypatch, backward):
    seen = []

    def tune(ffn, inputs, *, compiled):
        seen.append((ffn, inputs.requires_grad, torch.is_grad_enabled(), compiled))
        return Tuning(HALVES, {WHOLE: 2e-3, HALVES: 1e-3}, 20, None)

    monkeypatch.setattr(plugins, "load_tune", lambda: tune)
    runtime = SimpleNamespace(print=lambda *_: None)
    workload = SimpleNamespace(
        options=_options(backward=backward, no_compile=backward), runtime=runtime, inputs=torch.zeros(2, 4, 8),
        block=SimpleNamespace(ffn="ffn"),
    )  # fmt: skip
    seconds = {str(WHOLE): 2e-3, str(HALVES): 1e-3}
    assert tuning.tune(workload) == {"plan": str(HALVES), "seconds": seconds, "rounds": 20}
    assert seen == [("ffn", backward, backward, not backward)]
    workload.options.tune = False
    assert tuning.tune(workload) is None and len(seen) == 1


SAMPLES = {WHOLE: [2.0, 2.0, 9.0], HALVES: [1.0, 1.0, 1.0], FOUR: [1.5, 1.0, 1.5]}


def _planner_record(rows):
    return {
        "schema": record.SCHEMA_VERSION, "kind": "planner", "configuration": {}, "world_size": 2,
        "environment": {"torch": "2.6.0", "device": "x86_64 CPU", "git_commit": "a" * 40},
        "pass": "forward", "settings": {}, "shapes": rows, "geometric_means": judge_planner.means(rows),
    }  # fmt: skip


def test_choices_are_held_against_the_best():
    row = judge_planner.judged([8, 16, 64, 2], SAMPLES, FOUR, WHOLE, FOUR)
    assert row["over_best"] == {"planner": 1.5, "tuned": 2.0, "four": 1.5, "unchunked": 2.0, "best": 1.0}
    other = judge_planner.judged([4, 16, 64, 2], SAMPLES, HALVES, HALVES, None)
    means = judge_planner.means([row, other])
    assert means["planner"] == pytest.approx(math.sqrt(1.5)) and means["four"] == pytest.approx(1.5)
    assert "2,2,2,2 r4 a2 b1 s0  <- planner, four" in judge_planner.describe(row)
    assert "planner    geometric mean 22.5%, worst 50.0%, 1 within 3 %" in judge_planner.summary([row, other])
    content = _planner_record([row, other])
    assert record.validate(json.loads(json.dumps(content))) == content


@pytest.mark.parametrize("change", [
    lambda content: content["shapes"][0]["over_best"].update(planner=1.0),
    lambda content: content["shapes"][0]["choices"].update(tuned="16 r4 a2 b1 s0"),
    lambda content: content["geometric_means"].update(planner=1.0),
    lambda content: content["geometric_means"].pop("tuned"),
])  # fmt: skip
def test_a_record_whose_figures_do_not_follow_from_its_samples_is_refused(change):
    content = _planner_record([judge_planner.judged([8, 16, 64, 2], SAMPLES, FOUR, WHOLE, FOUR)])
    change(content)
    with pytest.raises(ValueError, match="over_best|geometric_means"):
        record.validate(content)


@pytest.mark.parametrize("shape", ["x", [8, 16, 64], [8, 16, 64, 0], [8, 16, 64, True], None])
def test_a_row_of_no_shape_is_refused(shape):
    content = _planner_record([judge_planner.judged([8, 16, 64, 2], SAMPLES, FOUR, WHOLE, FOUR)])
    content["shapes"][0]["shape"] = shape
    with pytest.raises(ValueError, match="shape="):
        record.validate(content)


def test_rows_of_other_code_or_another_kind_are_not_added_to(tmp_path):
    output = tmp_path / "planner.json"
    parser = judge_planner.build_parser()
    options = parser.parse_args(["--shapes", "s.json", "--output", str(output), "--device", "cpu"])
    device = torch.device("cpu")
    assert judge_planner._earlier(parser, options, 2, device) == []
    rows = [judge_planner.judged([8, 16, 64, 2], SAMPLES, FOUR, WHOLE, FOUR)]
    runtime = SimpleNamespace(device=device, world_size=2)
    content = judge_planner._record(parser, options, runtime, rows)
    record.write(content, output)
    assert judge_planner._earlier(parser, options, 2, device) == json.loads(json.dumps(rows))
    for name in ("git_commit", "triton", "torch", "cuda_build", "device"):
        record.write({**content, "environment": {**content["environment"], name: "other"}}, output)
        with pytest.raises(ValueError, match=f"of another configuration .{name}='other'"):
            judge_planner._earlier(parser, options, 2, device)
    record.write({**content, "environment": {**content["environment"], "python": "3", "numpy": "1"}}, output)
    assert len(judge_planner._earlier(parser, options, 2, device)) == 1
    broken = {**content, "configuration": {"dtype": 3}}, {**content, "kind": "x"}
    for text in ("[" * 200_000, *map(json.dumps, broken)):
        output.write_text(text)
        with pytest.raises(ValueError, match="planner.json: is no (record|JSON)"):
            judge_planner._earlier(parser, options, 2, device)


def test_four_even_chunks_are_those_of_the_collectives():
    layout, peers = Layout(2, 8, 16, 64, 128), Plan((2, 2, 2, 2), peers=True)
    assert judge_planner.four([WHOLE, peers, FOUR], layout, "cuda", Settings()) == FOUR
    assert judge_planner.four([WHOLE, peers], layout, "cuda", Settings()) is None
