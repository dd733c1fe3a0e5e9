"""`scripts/measure.py` under torchrun with two gloo ranks: one record, with every rank's samples and figures."""

import json
from pathlib import Path

from rankmixer import record
from test_benchmark_commands import SMALL, launch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure.py"


def test_a_measurement_of_forward_and_backward(tmp_path):
    scales = ["--comm-scale", "2", "--compute-scale", "2"]
    arguments = ["--backward", "--rounds", "2", "--output", str(tmp_path), *scales]
    result = launch(SCRIPT, *SMALL, *arguments)
    assert result.returncode == 0, result.stderr
    content = record.validate(json.loads((tmp_path / "measurement_backward.json").read_text()))
    assert content["world_size"] == 2 and content["pass"] == "forward+backward"
    assert all(content["configuration"][name]["value"] == 2 for name in ("comm_scale", "compute_scale"))
    assert {len(value["samples_s"]) for value in content["measurements"].values()} == {2}
    hiding = content["hiding"]["kernel"]
    assert len(hiding["ranks"]) == 2
    for figures in (hiding["slowest_rank"], *hiding["ranks"]):
        times = figures["times_s"]
        assert all(time > 0 for time in times.values())
        assert figures["hidden_fraction"] == (times["serial"] - times["overlap"]) / times["comm"]
        assert figures["hidden_fraction_own"] == (times["own"] - times["overlap"]) / times["comm"]
    assert "note: no device trace" in result.stdout and "hidden = (T_none - T) / T_comm" not in result.stdout
