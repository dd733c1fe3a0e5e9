"""The simulator's scripts: fits that are the machine's numbers, rows that are records, the same bytes twice."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import compare
import pytest
from rankmixer import record, variants

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import calibrate  # noqa: E402
import simulate as command  # noqa: E402

from compile_overlap import plan  # noqa: E402
from compile_overlap.config import Settings  # noqa: E402
from compile_overlap.machines import FITTED  # noqa: E402


@pytest.fixture(scope="module")
def calibration():
    return calibrate.calibrate()


def test_the_machine_s_numbers_are_the_fit_s(calibration):
    assert calibration["fitted"] == pytest.approx(FITTED._asdict())
    assert len({file for _, file, _ in calibrate.FITS}) == 4


def test_a_fitted_latency_is_simulated_as_measured():
    known = {found.name: found for found in calibrate.configurations()}
    for _, file, mode in calibrate.FITS:
        found = known[file]
        assert calibrate.predicted(found, mode, FITTED) == pytest.approx(found.measured[mode], rel=0.01), (file, mode)


def test_no_fitted_configuration_is_judged_and_the_target_is_met(calibration):
    fitted_on = {each["configuration"] for each in calibration["fitted_on"]}
    judged = {point["configuration"] for point in calibration["judged"]}
    assert not fitted_on & judged and len(judged) >= calibrate.TARGET_CONFIGURATIONS
    assert calibration["median_error"] <= calibrate.TARGET_ERROR
    assert not any("naive" in point["mode"] or "inductor-" in point["mode"] for point in calibration["judged"])
    assert "SIMULATED" in calibrate.table(calibration)


def test_the_written_calibration_is_this_one(calibration):
    written = json.loads(command.CALIBRATION.read_text())
    assert written["fitted"] == calibration["fitted"] and written["fitted_on"] == calibration["fitted_on"]


def test_the_written_scaling_is_what_the_code_computes():
    written = json.loads((command.CALIBRATION.parent / "scaling.json").read_text())
    assert written["cases"] == json.loads(json.dumps([command.answer(each) for each in command.standard()]))


def test_a_recorded_plan_is_what_is_simulated():
    known = next(found for found in calibrate.configurations() if found.name == calibrate.SHARED_MEMORY_FORWARD)
    machine = known.machine(FITTED)
    recorded = known._replace(plans={"kernel": "16,16 r9 a1 b1 s16"})
    assert str(calibrate.plan_of(recorded, "kernel", machine)) == "16,16 r9 a1 b1 s16"
    assert calibrate.plan_of(known, "kernel", machine).sizes == (4, 8, 8, 8, 4)
    with pytest.raises(KeyError):
        calibrate.plan_of(known._replace(plans={"kernel": None}), "kernel", machine)
    slower = calibrate.predicted(known._replace(plans={"kernel": "32 r9 a2 b1 s0"}), "kernel", FITTED)
    assert slower > 1.2 * calibrate.predicted(known, "kernel", FITTED)


def test_predictions_beside_a_folder_s_records_are_the_calibration_s(calibration, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "some-shm"
    folder.mkdir()
    judged = [point for point in calibration["judged"] if point["configuration"].startswith("h200x2-torch-2.11.0-shm/")]
    for name in {point["configuration"] for point in judged}:
        shutil.copy(calibrate.RESULTS / name, folder)
    content = json.loads((calibrate.RESULTS / calibrate.EAGER_BACKWARD).read_text())
    content["environment"]["device"] = "some GPU"
    (folder / "other.json").write_text(json.dumps(content))
    (folder / "topology.json").write_text("[]")
    single = {**content, "environment": {**content["environment"], "device": "NVIDIA H200"}, "kind": "full",
              "samples_s": [[0.125], [0.1]], "slowest_rank": record.slowest_rank([[0.125], [0.1]]), "rank0": {},
              "transport": None, "tokens_per_s": 1.0, "forward_tflops": None, "full_batch": None, "output_shape": [],
              "plan": "16,16 r1 a2 b1 s0"}  # fmt: skip
    single["configuration"] = {**content["configuration"], "overlap": {"value": "kernel"}}
    del single["measurements"]
    (folder / "single.json").write_text(json.dumps(single))
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--predict", str(folder)])
    assert calibrate.main() == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("SIMULATED beside measured") and f"{len(judged) + 1} latencies" in first
    for point in judged:
        name = f"{Path(point['configuration']).name}  {point['mode']} "
        (line,) = (line for line in lines if line.startswith(name))
        times = [f"{point[time] * 1e3:.3f}" for time in ("measured_s", "simulated_s")]
        assert line.split()[-3:] == [*times, f"{point['error']:+.1%}"]
    assert any(line.startswith("single.json  kernel") and " 125.000 " in line for line in lines)
    assert lines[-2:] == [
        "other.json: not simulated, no model of some GPU", "topology.json: not simulated, it holds no times of modes",
    ]  # fmt: skip


@pytest.mark.parametrize("change, message", [
    (None, r"wrong.json: is no JSON \("), ({"measurements": {}}, "measurements=.*: must be of .*none"),
    ({"exchange": {}}, r"not what such a record holds \(KeyError"),
    ({"environment": {}}, "environment field 'torch' is missing"),
    ({"configuration": {"no_compile": {"value": True}}}, "not what such a record holds"),
])  # fmt: skip
def test_a_file_that_cannot_be_predicted_is_named_and_the_others_are(tmp_path, change, message):
    text = (calibrate.RESULTS / calibrate.EAGER_BACKWARD).read_text()
    (tmp_path / "good.json").write_text(text)
    (tmp_path / "wrong.json").write_text(text[:5000] if change is None else json.dumps({**json.loads(text), **change}))
    lines = calibrate.predict(tmp_path).splitlines()
    assert re.search(f"^wrong.json: not simulated, .*{message}", lines[-1])
    assert any(line.startswith("good.json  none ") for line in lines)


def test_what_is_no_folder_is_not_predicted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--predict", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="2"):
        calibrate.main()
    assert "must be a folder of records" in capsys.readouterr().err


def test_the_planner_s_candidates_are_modes_of_the_comparison(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--ranks", "2", "--modes"])
    assert command.main() == 0
    modes = capsys.readouterr().out.strip()
    names = compare.parse_modes(modes)
    asked = command.Question("H200", 2)
    ranked = plan.ranked_on(asked.machine, asked.layout, 2, "cuda", False, Settings())
    assert names[:2] == ["none", "kernel:TRANSPORT=collectives"] and len(names) == 2 + len(ranked) > 5
    for name, each in zip(names[2:], ranked):
        monkeypatch.setenv("A2A_FFN_CHUNKS", variants.parse(name).environment["A2A_FFN_CHUNKS"])
        again = plan.ranked_on(asked.machine, asked.layout, 2, "cuda", False, Settings.from_environment())
        assert again == (each,)


@pytest.mark.parametrize("arguments", [["--ranks", "16", "--cards", "2", "--backward", "--path"], ["--rows"]])
def test_the_command_writes_the_same_bytes_twice(monkeypatch, capsys, tmp_path, arguments):
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments, "--json", str(file)])
        assert command.main() == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert capsys.readouterr().out.startswith("SIMULATED: fitted on 4 configurations")
    assert record.validate(json.loads(files[0].read_text()))["simulated"] is True


@pytest.mark.parametrize("arguments, message", [
    *((f"--{name} {value}", f"{name.replace('-', '_')} = {value}: must be from 1 to 1048576") for name in (
        "ranks", "gpus-per-host", "batch-size", "tokens", "dim", "k", "comm-scale", "compute-scale", "chunks")
      for value in (0, -5, 10**400)),
    ("--ranks 1", "ranks = 1: must be at least 2"), ("--ranks 3", "must be a multiple of --ranks 3"),
    ("--gpus-per-host 3", "must be a multiple of its 3 hosts"),
    ("--transport peers --link", "peers"), ("--ranks 0 --modes", "ranks = 0"),
])  # fmt: skip
def test_a_question_without_an_answer_is_refused(monkeypatch, capsys, arguments, message):
    words = arguments.split()
    words += ["host shared memory"] * (words[-1] == "--link")
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_nothing_is_saved_where_exchanges_cost_nothing(monkeypatch):
    times = iter((0.004, 0.005, 0.003, 0.004))  # none is faster than the same without exchanges

    def timeline(*_, **__):
        return SimpleNamespace(total=next(times), communication=0.0, exposed=0.0, hidden_fraction=0.0)

    monkeypatch.setattr(command.Question, "timeline", timeline)
    assert command.answer(command.Question("H200", 2))["saved_of_exchanges"] == 0.0


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tokens = 64: must be a multiple of --ranks 3"):
        command.answer(command.Question("H200", 3))


def test_a_simulated_record_must_say_so(calibration):
    with pytest.raises(ValueError, match="simulated=None: must be true"):
        record.validate({name: value for name, value in calibration.items() if name != "simulated"})


@pytest.mark.parametrize("value", [-1.0, 0, float("inf"), float("nan"), True, "1"])
def test_fitted_numbers_are_positive_and_finite(calibration, value):
    with pytest.raises(ValueError, match="fitted.eager_launch_s="):
        record.validate({**calibration, "fitted": {**calibration["fitted"], "eager_launch_s": value}})
