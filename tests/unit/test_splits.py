"""`scripts/splits.py` on CPU with a tiny shape: its record, what equals the whole, and that a wrong split shows."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rankmixer import record

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import splits  # noqa: E402

TINY = "--device cpu --rows 16 --tokens 16 --dim 16 --k 2 --warmup 0 --num-tests 2 --rounds 1 --no-l2-flush".split()
NORMS = {"norm_x.weight", "norm_x.bias", "norm_gate.weight", "norm_gate.bias"}
ASKED = [(None, 1), *((axis, parts) for axis in ("L", "rows", "H") for parts in (2, 4, 8))]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("splits") / "splits.json"
    assert splits.main([*TINY, "--json", str(file)]) == 0
    return record.validate(json.loads(file.read_text()))


def differing(row):
    return {name for name, verdict in row["compared"].items() if not verdict["equal"]}


def test_the_record_holds_every_split_and_both_passes(result):
    assert [(row["axis"], row["parts"]) for row in result["splits"]] == ASKED
    assert all(len(each["samples_s"]) == 2 for row in result["splits"] for each in row["passes"].values())
    assert result["recipe"] == "eager_exact" and result["configuration"]["rows"]["value"] == 16
    assert set(result["splits"][1]["compared"]) == {"output", "inputs", *splits.PARAMETERS}


def test_what_equals_the_whole(result):
    """Along L everything but the norms' gradients, along rows the output, along H all but sums over its parts."""
    for row in result["splits"][1:]:
        allowed = {"L": NORMS, "rows": set(splits.PARAMETERS), "H": {"output", "inputs"}}[row["axis"]]
        assert differing(row) <= allowed, (row["axis"], row["parts"])
        assert max(each["relative_error"] for each in row["compared"].values()) < 0.05
    halves = {row["axis"]: differing(row) for row in result["splits"] if row["parts"] == 2}
    assert {"w1", "wout"} <= halves["rows"] and "output" in halves["H"]


def test_a_wrong_split_is_seen():
    options = splits.build_parser().parse_args(TINY)
    case = splits.make_case(options, torch.device("cpu"))
    wrong = case._replace(parameters={**case.parameters, "wout": case.parameters["wout"].roll(1, 0)})  # another token's
    verdict = splits.compared(splits.split(wrong, "L", 2).results(), splits.split(case, None, 1).results())
    assert not verdict["output"]["equal"] and not verdict["w1"]["equal"] and verdict["output"]["relative_error"] > 0.1


@pytest.mark.parametrize("arguments, message", [(["--tokens", "12"], "L=12: must be a multiple of 8"),
                                                (["--rows", "0"], "rows=0: must be")])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        splits.main([*TINY, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("index, change, message", [
    (0, {"axis": "L"}, "must be null and 1 first"), (1, {"axis": "D"}, "must be null and 1 first"),
    (1, {"compared": {}}, "unless it is the whole"), (2, {"passes": {}}, "must have forward and forward"),
    (3, {"compared": {"output": {"equal": True, "relative_error": 0.1}}}, "has no error"),
])  # fmt: skip
def test_the_schema_rejects(result, index, change, message):
    broken = copy.deepcopy(result)
    broken["splits"][index] |= change
    with pytest.raises(ValueError, match=message):
        record.validate(broken)


def test_the_schema_rejects_a_median_that_is_not_the_samples(result):
    broken = copy.deepcopy(result)
    broken["splits"][4]["passes"]["forward"]["p50_s"] *= 2
    with pytest.raises(ValueError, match="must be the samples' median"):
        record.validate(broken)


def test_the_report_shows_a_record(result, tmp_path):
    for extra in ("matplotlib", "markdown_it", "jinja2"):
        pytest.importorskip(extra)
    import report

    shutil.copytree(ROOT / "reports" / "text", tmp_path / "text")
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "results" / "cpu").mkdir(parents=True)
    without, _ = report.build(tmp_path, tmp_path / "figures")
    record.write(result, tmp_path / "results" / "cpu" / "splits.json")
    markdown, _ = report.build(tmp_path, tmp_path / "figures")
    before, now = (text.split("**Measured.**")[1].split("## ")[0] for text in (without, markdown))
    assert "No record yet: the computation in parts" in before and "| `cpu/splits` | whole | 1 |" in now
    rows = [line for line in now.splitlines() if "| `cpu/splits` | " in line]
    assert len(rows) == len(ASKED) and "| none |" in rows[-1]
    assert "`norm_x.weight`" in rows[1] and "| equal |" in rows[1] and "| dispatch and combine |" in rows[1]
