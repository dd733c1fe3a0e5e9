"""The simulator's scripts: fits that are the machine's numbers, rows that are records, the same bytes twice."""

import json
import shutil
import sys
from pathlib import Path

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
              "slowest_rank": {"p50_s": 0.125}, "plan": "16,16 r1 a2 b1 s0"}  # fmt: skip
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
    assert lines[-1] == "other.json: not simulated, no model of some GPU"


def test_the_planner_s_candidates_are_modes_of_the_comparison(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--ranks", "2", "--modes"])
    assert command.main() == 0
    modes = capsys.readouterr().out.strip()
    names = compare.parse_modes(modes)
    asked = command.Question("H200", 2)
    ranked = plan.ranked_on(asked.machine, asked.layout, 2, "cuda", False, Settings())
    assert names[:2] == ["none", "kernel"] and len(names) == 2 + len(ranked) > 5
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


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tokens = 64: must be a multiple of --ranks 3"):
        command.answer(command.Question("H200", 3))


def test_a_simulated_record_must_say_so(calibration):
    with pytest.raises(ValueError, match="simulated=None: must be true"):
        record.validate({name: value for name, value in calibration.items() if name != "simulated"})
