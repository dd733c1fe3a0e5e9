"""The sweep's shapes, its confidence intervals and its results file."""

import copy
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import results_file
import sweep
from rankmixer import record

ENVIRONMENT = {"torch": "2.6.0", "device": "x86_64 CPU", "git_commit": "a" * 40}
COMMITTED = Path(__file__).resolve().parents[2] / "reports" / "shapes" / "held_out_32.json"


def test_shapes_lie_in_the_range():
    shapes = sweep.draw_shapes(200, seed=1)
    assert len({tuple(shape) for shape in shapes}) == 200
    for batch, tokens, dim, k in shapes:
        assert 1 <= batch <= 512 and 16 <= tokens <= 64 and tokens % 8 == 0
        assert 128 <= dim <= 1280 and dim % tokens == 0 and k in (2, 3, 6)
    assert min(shape[0] for shape in shapes) < 3 and max(shape[0] for shape in shapes) > 400


def test_the_committed_shapes_are_those_of_the_seed():
    assert json.loads(COMMITTED.read_text()) == sweep.draw_shapes(32, seed=7)
    assert all(sweep.read_shapes(path, world_size=8) for path in sweep.SHAPES) and str(COMMITTED) in sweep.SHAPES


@pytest.mark.parametrize("content", ["[]", "{}", "[[1, 16, 128]]", "[[1, 16, 130, 2]]", "[[1, 15, 150, 2]]", '[["1", 16, 128, 2]]',
                                     "[[true, 16, 128, 2]]"])
def test_other_shapes_are_refused(tmp_path, content):
    path = tmp_path / "shapes.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="must be a list of"):
        sweep.read_shapes(path, world_size=2)


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "shapes.json").write_text("[[1,")
    with pytest.raises(ValueError, match="shapes.json'?: is no JSON"):
        sweep.read_shapes(tmp_path / "shapes.json", world_size=2)


@pytest.mark.parametrize("arguments, message", [
    (["--draw", "0"], "draw=0: must be from 1"), (["--draw", "100000"], "draw=100000"), (["--draw", "-1"], "draw=-1"),
    (["--rounds", "0"], "rounds=0: must be at least 1"), ([], "output=None"),
    (["--draw", "3", "--shapes", "a.json", "b.json"], "must be the one file"),
    (["--modes", "none,none"], "modes="), (["--modes", "none,sm-free", "--own-comp-only"], "own_comp_only=True"),
])
def test_mistakes_are_named(tmp_path, capsys, arguments, message):
    (tmp_path / "shapes.json").write_text("[[1, 16, 128, 2]]")
    flags = ["--device", "cpu", "--shapes", str(tmp_path / "shapes.json")]
    assert sweep.main([*flags, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_by_default_all_modes_run_that_this_torch_has():
    assert sweep.all_modes(no_compile=True).split(",") == list(sweep.MODES)
    compiled = sweep.all_modes(no_compile=False).split(",")
    assert compiled[:5] == list(sweep.MODES) and {"none:inductor-reorder", "kernel:inductor-reorder"} <= set(compiled)


def test_a_mode_that_some_shapes_cannot_run_is_summarised_over_the_others():
    partial = _record(4.0, 2.0)
    del partial["summary"]["kernel"], partial["measurements"]["kernel"]
    summary = results_file.summarize([partial, _record(3.0, 1.0)])
    assert len(summary["kernel"]["shapes"]) == 1 and summary["kernel"]["worst"] == 3.0


def test_the_interval_holds_the_ratio_and_narrows_with_the_samples():
    noise = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        baseline, candidate = noise.normal(2.0, 0.1, count), noise.normal(1.0, 0.05, count)
        ratio, low, high = results_file.ratio_interval(baseline, candidate)
        assert low <= ratio <= high and low < 2.05 and high > 1.95
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def _record(none, kernel, batch=8, ranks=2, **environment):
    measurements = {}
    for name, value in (("none", none), ("kernel", kernel)):
        samples = [[value, value], *[[value / 2, value / 2]] * (ranks - 1)]
        measurements[name] = {"samples_s": samples, "slowest_rank": record.slowest_rank(samples)}
    configuration = {"batch_size": batch, "tokens": 16, "dim": 128, "k": 2, "no_compile": False, "dtype": "bf16"}
    return {"schema": record.SCHEMA_VERSION, "kind": "comparison", "exchange": {}, "peak_memory_bytes": [], "rounds": 1,
            "transports": {}, "plans": {}, "variants": {}, "failed": {},
            "summary": {"none": {}, "kernel": {}}, "measurements": measurements, "pass": "forward", "world_size": ranks,
            "configuration": {name: {"value": value} for name, value in configuration.items()}, "plugin": "some",
            "environment": {**ENVIRONMENT, **environment}, "variables": {}, "checks": {},
            "full_batch": {"kernel": {"equal": True}}}


def test_the_summary_of_two_shapes():
    summary = results_file.summarize([_record(4.0, 2.0), _record(1.0, 2.0)])
    assert summary["kernel"]["geometric_mean"] == pytest.approx(1.0) and summary["kernel"]["worst"] == 0.5
    assert "geometric mean 1.000, worst 0.500, 2 shapes" in sweep.table(summary)


def test_lines_are_read_as_they_were_appended(tmp_path):
    path, lines = tmp_path / "sweep.jsonl", [_record(2.0, 1.0, batch) for batch in (1, 2, 3)]
    assert results_file.read(path) == []
    for line in lines:
        results_file.append(path, line)
    assert results_file.read(path) == lines
    assert [results_file.shape_of(line) for line in lines] == [(1, 16, 128, 2), (2, 16, 128, 2), (3, 16, 128, 2)]


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_line_that_was_cut_off_is_written_again(tmp_path, kept):
    path, first, second = tmp_path / "sweep.jsonl", _record(2.0, 1.0, 1), _record(2.0, 1.0, 2)
    results_file.append(path, first)
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(second).encode()[:kept])
    assert results_file.read(path) == [first]
    results_file.append(path, second)
    assert results_file.read(path) == [first, second] and path.read_bytes().startswith(whole)


def _changed(change):
    line = _record(2.0, 1.0)
    change(line)
    return json.dumps(line)


@pytest.mark.parametrize("line, words", [
    ("{", "delimiter|property name"), ("[]", "must be an object"), ('{"pass": 1}', "kind=None"),
    ("[" * 200_000, "nested too deeply"),
    (_changed(lambda line: line.pop("plugin")), "'plugin' is missing"),
    (_changed(lambda line: line.update(kind="full")), "missing"),
    (_changed(lambda line: line.pop("variables")), "its variables"),
    (_changed(lambda line: line.update(configuration={})), "must hold batch_size, tokens"),
    (_changed(lambda line: line.update(configuration={"tokens": 3})), "must be an object with a value"),
    (_changed(lambda line: line["configuration"]["tokens"].update(value=0)), "configuration.tokens=0: must be a count"),
    (_changed(lambda line: line["measurements"].pop("none")), "must be of none too"),
    (_changed(lambda line: line["measurements"]["none"].update(samples_s=[[], []])), "non-empty samples"),
    (_changed(lambda line: line["measurements"]["none"].update(samples_s=[[0.0], [0.0]])), "above 0 seconds"),
    (_changed(lambda line: line["measurements"]["none"].update(samples_s=[[float("nan")], [1.0]])), "NaN is no number"),
    (_changed(lambda line: line["measurements"]["none"]["slowest_rank"].update(p50_s=1.0)), "the samples' is 2.0"),
], ids=range(15))
def test_a_broken_line_is_named(tmp_path, line, words):
    path = tmp_path / "sweep.jsonl"
    results_file.append(path, _record(2.0, 1.0))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"line 2 is no record of a sweep: .*({words})"):
        results_file.read(path)


def test_a_shape_stands_once_in_a_comparison(tmp_path):
    path = tmp_path / "sweep.jsonl"
    results_file.append(path, _record(2.0, 1.0))
    with pytest.raises(ValueError, match=r"\('forward', 'compiled'\) has the shape \(8, 16, 128, 2\) already"):
        results_file.append(path, _record(3.0, 1.0))
    assert results_file.read(path) == [_record(2.0, 1.0)]


def test_writers_at_the_same_time_lose_nothing(tmp_path, monkeypatch):
    path, started, read = tmp_path / "sweep.jsonl", threading.Barrier(3), results_file.read

    def slowly(file):
        lines = read(file)
        time.sleep(0.02)  # the others' turn
        return lines

    monkeypatch.setattr(results_file, "read", slowly)

    def write(first):
        started.wait()
        for batch in range(first, 16, 3):
            results_file.append(path, _record(2.0, 1.0, batch))

    writers = [threading.Thread(target=write, args=(first,)) for first in (1, 2, 3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert sorted(results_file.shape_of(line)[0] for line in results_file.read(path)) == list(range(1, 16))


def test_a_second_sweep_of_a_file_is_refused(tmp_path):
    path = tmp_path / "sweep.jsonl"
    with results_file.only_sweep(path):
        with pytest.raises(ValueError, match="another sweep is writing it"), results_file.only_sweep(path):
            pass
        with results_file.only_sweep(tmp_path / "other.jsonl"):
            pass
    with results_file.only_sweep(path):
        pass


@pytest.mark.parametrize("error", [ValueError("wrong"), OSError("wrong"), KeyError("wrong"), RecursionError("wrong")])
def test_whatever_the_main_rank_s_file_raises_is_told_to_all_ranks(error):
    told = []

    def fails():
        raise error

    runtime = SimpleNamespace(is_main=True, gather=lambda outcome: told.append(outcome) or [outcome])
    with pytest.raises(sweep.Refused, match="wrong"):
        sweep.agreed(runtime, fails)
    assert len(told) == 1 and sweep.agreed(SimpleNamespace(is_main=False, gather=lambda _: [(7, None)]), fails) == 7


def test_another_stack_machine_or_setting_is_refused_and_named(tmp_path):
    path = tmp_path / "sweep.jsonl"
    results_file.append(path, _record(2.0, 1.0))
    before = path.read_bytes()
    others = {"environment.torch='2.6.0' there, '2.7.0' now": _record(2.0, 1.0, torch="2.7.0"),
              "environment.git_commit": _record(2.0, 1.0, git_commit="b" * 40),
              "world_size=2 there, 4 now": _record(2.0, 1.0, ranks=4),
              "plugin='some' there, None now": {**_record(2.0, 1.0), "plugin": None},
              "variables.NCCL_P2P_DISABLE=None there, '1' now":
                  {**_record(2.0, 1.0), "variables": {"NCCL_P2P_DISABLE": "1"}}}
    dtype = copy.deepcopy(_record(2.0, 1.0, batch=9))
    dtype["configuration"]["dtype"]["value"] = "fp32"
    others["dtype='bf16' there, 'fp32' now"] = dtype
    for words, other in others.items():
        with pytest.raises(ValueError, match="line 1 is of another configuration") as error:
            results_file.append(path, other)
        assert words in str(error.value)
    assert path.read_bytes() == before


def test_another_pass_is_another_comparison_of_the_same_file(tmp_path):
    path, backward = tmp_path / "sweep.jsonl", {**_record(5.0, 4.0), "pass": "forward+backward"}
    backward["configuration"]["dtype"]["value"] = "fp32"
    results_file.append(path, _record(2.0, 1.0))
    results_file.append(path, backward)
    assert len(set(map(results_file.comparison_of, results_file.read(path)))) == 2
    with pytest.raises(ValueError, match="environment.torch"):
        results_file.append(path, {**backward, "environment": {**ENVIRONMENT, "torch": "2.7.0"}})


def test_a_setting_that_one_record_lacks_is_a_difference():
    old, new = _record(2.0, 1.0), _record(2.0, 1.0)
    new["configuration"]["tune"] = {"value": True}
    assert results_file.differences(old, new) == ["tune=None there, True now"]


def test_variables_of_exchanges_and_compilation_are_recorded(monkeypatch):
    for name, value in (("NCCL_P2P_DISABLE", "1"), ("A2A_FFN_KERNEL_PLUGIN", "/some/where"), ("HOME", "/root")):
        monkeypatch.setenv(name, value)
    recorded = results_file.variables()
    assert recorded["NCCL_P2P_DISABLE"] == "1" and not {"A2A_FFN_KERNEL_PLUGIN", "HOME"} & set(recorded)
