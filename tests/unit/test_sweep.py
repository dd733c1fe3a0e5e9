"""The sweep's shapes, its confidence intervals and its record."""

import json
from pathlib import Path

import numpy as np
import pytest
import sweep
from rankmixer import record

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
    assert sweep.read_shapes(COMMITTED, world_size=8)


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
    (["--modes", "none,none"], "modes="), (["--modes", "none,sm-free", "--own-comp-only"], "own_comp_only=True"),
])
def test_mistakes_are_named(tmp_path, capsys, arguments, message):
    (tmp_path / "shapes.json").write_text("[[1, 16, 128, 2]]")
    flags = ["--device", "cpu", "--shapes", str(tmp_path / "shapes.json")]
    assert sweep.main([*flags, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_mode_that_some_shapes_cannot_run_is_summarised_over_the_others():
    partial = _record(4.0, 2.0)
    del partial["summary"]["kernel"], partial["measurements"]["kernel"]
    summary = sweep.summarize([partial, _record(3.0, 1.0)])
    assert len(summary["kernel"]["shapes"]) == 1 and summary["kernel"]["worst"] == 3.0


def test_the_interval_holds_the_ratio_and_narrows_with_the_samples():
    noise = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        baseline, candidate = noise.normal(2.0, 0.1, count), noise.normal(1.0, 0.05, count)
        ratio, low, high = sweep.ratio_interval(baseline, candidate)
        assert low <= ratio <= high and low < 2.05 and high > 1.95
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def _record(none, kernel):
    measurements = {name: {"samples_s": [[value, value], [value / 2, value / 2]]} for name, value in
                    (("none", none), ("kernel", kernel))}
    configuration = {name: {"value": 8} for name in sweep.SHAPE}
    return {"summary": {"none": {}, "kernel": {}}, "measurements": measurements, "configuration": configuration,
            "full_batch": {"kernel": {"equal": True}}}


def test_the_summary_is_a_valid_record():
    summary = sweep.summarize([_record(4.0, 2.0), _record(1.0, 2.0)])
    assert summary["kernel"]["geometric_mean"] == pytest.approx(1.0) and summary["kernel"]["worst"] == 0.5
    content = {"schema": record.SCHEMA_VERSION, "kind": "sweep", "environment": {}, "world_size": 2, "pass": "forward",
               "shapes": "some.json", "modes": summary}
    record.validate(content)
    assert "geometric mean 1.000, worst 0.500, 2 shapes" in sweep.table(summary)
    summary["kernel"]["geometric_mean"] = 2.0
    with pytest.raises(ValueError, match="geometric_mean=2.0"):
        record.validate(content)
