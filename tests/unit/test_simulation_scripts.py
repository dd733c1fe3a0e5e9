"""The simulator's scripts: fits that are the machine's numbers, rows that are records, the same bytes twice."""

import json
import sys
from pathlib import Path

import pytest
from rankmixer import record

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import calibrate  # noqa: E402
import simulate as command  # noqa: E402

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
