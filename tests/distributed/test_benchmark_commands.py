"""The benchmark's commands under torchrun with two gloo ranks: failing checks and mistakes end every rank."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "research_topic_2"
SMALL = ("--batch-size 4 --tokens 16 --dim 128 --k 2 --no-compile --warmup 1 --num-tests 3 --device cpu "
         "--no-l2-flush").split()
PLUGIN = """
import torch.distributed as dist
def forward_ffn(ffn, inputs, *, comp_only=False):
    out = ffn.forward(inputs, overlap="none", comp_only=comp_only)
    return out + 1.0 if {condition} else out
"""


def launch(script, *arguments, plugin="sequential_plugin"):
    environment = {**os.environ, "A2A_FFN_KERNEL_PLUGIN": str(plugin), "OMP_NUM_THREADS": "1", "NPROC": "2",
                   "PYTHON": sys.executable}
    command = ["bash", str(FOLDER / "scripts" / "run_prod_local.sh")] if script == "benchmark" else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER / script)]
    process = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        stdout, stderr = process.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too, where one hangs
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("condition, ranks", [("True", "[0, 1]"), ("dist.get_rank() == 1", "[1]")])
def test_a_wrong_plugin_fails_the_check_on_every_rank(tmp_path, condition, ranks):
    plugin = tmp_path / "wrong.py"
    plugin.write_text(PLUGIN.format(condition=condition))
    result = launch("benchmark", *SMALL, "--overlap", "kernel", "--check-correctness", "approx", plugin=plugin)
    assert result.returncode != 0
    assert f"check failed on rank(s) {ranks}" in result.stderr
    assert "maximum absolute error" in result.stderr and "of 4096 elements mismatch" in result.stderr
    assert "rank 0 kernel: mean" not in result.stdout


def test_tokens_that_do_not_divide_are_refused_before_any_exchange():
    result = launch("benchmark", *SMALL, "--tokens", "5", "--dim", "10")
    assert result.returncode != 0
    assert "tokens=5: must be a multiple of the number of ranks, 2" in result.stderr


def test_a_plugin_that_does_not_import_is_named():
    result = launch("benchmark", *SMALL, "--overlap", "kernel", plugin="no_such_plugin")
    assert result.returncode != 0
    assert "A2A_FFN_KERNEL_PLUGIN='no_such_plugin' cannot be imported" in result.stderr


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    shapes, more, output = tmp_path / "shapes.json", tmp_path / "more.json", tmp_path / "out" / "sweep.jsonl"
    flags = ["--modes", "none,kernel", "--output", str(output), "--full-batch-check",
             "--no-compile", "--warmup", "1", "--num-tests", "4", "--rounds", "2", "--device", "cpu", "--no-l2-flush"]
    shapes.write_text("[[2, 16, 128, 2]]")
    more.write_text("[[2, 16, 128, 2], [1, 16, 160, 2]]")
    assert launch("sweep.py", *flags, "--shapes", str(shapes)).returncode == 0
    first = output.read_text()
    assert first.count("\n") == 1
    output.write_text(first + first[: len(first) // 2])  # as if killed while it wrote
    both = [*flags, "--shapes", str(shapes), str(more)]
    result = launch("sweep.py", *both)
    assert result.returncode == 0, result.stderr
    assert "1 of 2 shapes are in" in result.stdout and "geometric mean" in result.stdout
    lines = output.read_text().splitlines(keepends=True)
    assert lines[0] == first and len(lines) == 2
    assert [json.loads(line)["configuration"]["dim"]["value"] for line in lines] == [128, 160]
    assert json.loads(lines[1])["full_batch"]["kernel"]["equal"] is True
    other = launch("sweep.py", *both, "--dtype", "fp32")
    assert other.returncode != 0 and "line 1 is of another configuration: dtype='bf16' there, 'fp32' now" in other.stderr
    assert "(rank 0)" in other.stderr and "(rank 1)" in other.stderr and output.read_text() == "".join(lines)
    output.write_text(first + "[" * 200_000 + "\n")
    damaged = launch("sweep.py", *both)
    assert all(f"Refused (rank {rank}): output='{output}': line 2 is no record" in damaged.stderr for rank in (0, 1))
    shapes.write_text("[[2, 15, 150, 2]]")
    assert "T a multiple of 2" in launch("sweep.py", *both).stderr


def test_comparison_measures_checks_and_records(tmp_path):
    file = tmp_path / "comparison.json"
    result = launch("compare.py", *SMALL, "--backward", "--check-correctness", "approx", "--full-batch-check",
                    "--rounds", "2", "--own-comp-only", "--json", str(file))
    assert result.returncode == 0, result.stderr
    record = json.loads(file.read_text())
    assert set(record["measurements"]) == {"none", "with-sm", "sm-free", "kernel", "comp-only:none",
                                           "comp-only:kernel", "exchanges"}
    assert all(len(value["samples_s"]) == 2 and len(value["samples_s"][0]) == 4
               for value in record["measurements"].values())
    assert record["transports"] == {"with-sm": "collective", "sm-free": "collective", "kernel": None}
    assert all(check["ran"] and check["rows"] == 2 for check in record["checks"].values())
    assert all(value["equal"] for value in record["full_batch"].values())
    assert "sm-free: symmetric memory needs CUDA devices; falling back" in result.stdout
