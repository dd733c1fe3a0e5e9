"""The scripts for machines that are not at hand: what they would run is parsed by what it would be given to."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import compare
import preflight
import pytest
from rankmixer import cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.append(str(SCRIPTS))


@functools.cache
def dry_run(script, *arguments, **environment):
    """{name of a step: (its limit or None, its words)}."""
    command = [sys.executable if script.endswith(".py") else "bash", str(SCRIPTS / script), "OUT", "--dry-run", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/").stdout.splitlines()
    found = (re.fullmatch(r"(\w[\w-]*)(?: \(at most (\d+) s\))?: (.*)", line) for line in lines)
    return {step[1]: (step[2] and int(step[2]), shlex.split(step[3])) for step in found}


def parsed(words, world_size):
    """The options of a benchmark, comparison or preflight command; None for another."""
    for name, parser in (("compare.py", compare.build_parser()), ("run_prod_local.sh", cli.build_parser()),
                         ("run_prod_cross.sh", cli.build_parser())):  # fmt: skip
        for index, word in enumerate(words):
            if word.endswith(f"/{name}"):
                assert Path(word).exists()
                options = parser.parse_args(words[index + 1 :])
                assert options.tokens % world_size == 0
                if name == "compare.py":
                    compare.check_modes(options)
                return options
    return None


def ranks_of(words):
    return int(words[words.index("--nproc-per-node") + 1])


@pytest.mark.parametrize("exists", [True, False])
def test_the_benchmark_s_launcher_takes_the_environment_that_is_named(tmp_path, exists):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    if exists:
        python.symlink_to("/bin/echo")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"A2A_VENV": str(tmp_path)}
    command = ["bash", str(ROOT / "research_topic_2" / "scripts" / "run_prod_local.sh"), "--k", "2"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    if exists:
        assert found.returncode == 0 and found.stdout.startswith("-m torch.distributed.run --standalone")
    else:
        assert found.returncode == 2 and f"A2A_VENV={tmp_path}: must be a Python environment" in found.stderr


ALL = {"with-sm", "sm-free", "kernel", "kernel:TRANSPORT=collectives"}  # kernel: the peers' memory, where it can be


def test_eight_gpus_covers_the_workload():
    steps = dry_run("eight_gpus.sh")
    options = {name: parsed(words, 8) for name, (_, words) in steps.items()}
    options = {name: each for name, each in options.items() if each is not None}
    assert list(steps)[:4] == ["link", "nvlink", "public_check", "p8"]
    wanted = {(ranks, backward, eager) for ranks in (4, 8) for backward in (False, True) for eager in (False, True)}
    for name, each in options.items():
        words = steps[name][1]
        full = each.full_batch_check and each.check_correctness == "approx"
        if hasattr(each, "modes") and full and ALL <= set(each.modes.split(",")):
            wanted.discard((ranks_of(words), each.backward, each.no_compile))
        assert (each.batch_size, each.tokens, each.dim, each.k) == (512, 64, 1280, 6)
    assert not wanted
    assert {each.comm_scale for each in options.values()} == {each.compute_scale for each in options.values()} == {1, 2}
    assert any("trace_overlap.py" in word for _, words in steps.values() for word in words)
    candidates = [mode.rpartition("=")[2] for mode in options["p8_chunks"].modes.split(",")[2:]]
    assert "1" in candidates and "2/4/2" in candidates  # uneven chunks of L = 8
    assert list(steps)[-1] == "simulated" and "--predict" in steps["simulated"][1]


def test_the_simulated_table_is_made_when_no_time_is_left(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "BUDGET": "0"}
    command = ["bash", SCRIPTS / "eight_gpus.sh", tmp_path, "--cpu", "--only", "public_check,simulated"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "skip  public_check: " in result.stdout and "ok    simulated" in result.stdout
    assert "SIMULATED beside measured" in (tmp_path / "table.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.tar.gz.0", "table.log"]


def test_only_what_is_asked_for_runs():
    assert list(dry_run("eight_gpus.sh", "--only", "p8_comm2,p4")) == ["p8_comm2", "p4"]
    shared = dry_run("eight_gpus.sh", "--only", "p8,assigned_none", A2A_SHARE_GPUS="1")
    assert [int(words[words.index("--num-tests") + 1]) for _, words in shared.values()] == [2, 2]
    result = subprocess.run(["bash", SCRIPTS / "eight_gpus.sh", "OUT", "--all"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr


def test_the_cpu_run_has_the_same_steps_but_for_the_gpus_own():
    gone = set(dry_run("eight_gpus.sh")) - set(dry_run("eight_gpus.sh", "--cpu"))
    assert gone == {"nvlink", "traces", "traces_backward"}


NODE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NNODES": "2", "NPROC": "8"}


def test_the_kit_checks_before_it_measures_and_covers_both_directions():
    steps = dry_run("cross_kit.sh", **NODE)
    assert list(steps)[:2] == ["topology", "preflight"]
    assert preflight.build_parser().parse_args(steps["preflight"][1][-6:]).target == "cluster"
    options = {name: parsed(words, 16 if "small" not in name else 4) for name, (_, words) in steps.items()}
    full = [each for each in options.values() if each and hasattr(each, "modes") and "sm-free" in each.modes]
    assert {(each.backward, each.no_compile) for each in full} == {(b, e) for b in (False, True) for e in (False, True)}
    for words in (words for _, words in steps.values() if "--nnodes" in words):
        assert words[words.index("--node-rank") + 1] == "1" and words[words.index("--master-addr") + 1] == "10.0.0.1"


def test_the_kit_needs_to_know_the_node():
    environment = {name: value for name, value in os.environ.items() if name not in NODE}
    result = subprocess.run(["bash", SCRIPTS / "cross_kit.sh", "OUT"], env=environment, capture_output=True, text=True)
    assert result.returncode != 0 and "NODE_RANK=0 MASTER_ADDR=IP" in result.stderr


def test_the_kit_under_slurm(tmp_path):
    """`srun` and `scontrol` are played by scripts."""
    for name, text in (("scontrol", 'echo first; echo second'), ("getent", "echo 127.0.1.1 first; echo 10.1.2.3 first"),
                       ("srun", "shift 2; for node in 0 1; do SLURM_NODEID=$node \"$@\" || exit; done")):  # fmt: skip
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7"}
    result = subprocess.run(
        ["bash", "scripts/slurm/cross_kit.sbatch", "--dry-run", "--only", "topology"],
        cwd=ROOT, env={**os.environ, **own, "PYTHON": sys.executable}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(f"--nnodes 2 --nproc-per-node 8 --node-rank {node} --master-addr 10.1.2.3" in lines[node] for node in (0, 1))


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes_on_gpus_of_one_host(per_node):
    import cross_gpu

    for link in cross_gpu.LINKS:
        first, second = cross_gpu.environments(link, per_node, 29500)
        assert not set(first["CUDA_VISIBLE_DEVICES"].split(",")) & set(second["CUDA_VISIBLE_DEVICES"].split(","))
        assert (first.get("NCCL_HOSTID") != second.get("NCCL_HOSTID")) == (link == "sockets")
        for name, command in cross_gpu.steps(link, per_node).items():
            options = parsed(command, 2 * per_node)
            if options is not None and hasattr(options, "modes"):
                assert ("kernel:peers" in options.modes) == (link == "sockets" and per_node == 2), name
    assert dry_run("cross_gpu.py", "--per-node", str(per_node)).keys() >= {"sockets_small_kernel", "shared-memory_default"}


def test_what_fails_is_in_the_table(tmp_path):
    """`steps.sh`: statuses, the skip where time is short, and the pieces that are handed back."""
    script = f"""
        root={ROOT} work={tmp_path}/work out={tmp_path} only= dry_run=0 budget=1000 patience=1
        mkdir -p $work; source {SCRIPTS}/steps.sh
        step good 10 true; step wrong 10 sh -c 'echo reason; exit 3'; step slow 1 sleep 30
        budget=0; step late 10 true; echo failed=$failed"""
    result = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, timeout=60)
    table = (tmp_path / "table.log").read_text()
    for line in ("ok    good", "FAIL  wrong", "FAIL  slow"):
        assert line in table
    assert "status 3" in table and "status 124" in table and "reason" in result.stdout
    assert "skip  late" in result.stdout and "failed=1" in result.stdout
    listed = subprocess.run(["tar", "-tzf", tmp_path / "results.tar.gz.0"], capture_output=True, text=True).stdout
    assert "wrong.log" in listed and "table.log" in listed


@pytest.mark.parametrize("script", ["eight_gpus.sh", "gpu_suite.sh"])
@pytest.mark.parametrize("arguments, status, words", [
    (["--help"], 0, "usage|gpu_suite.sh OUT"), (["-h"], 0, "usage|gpu_suite.sh OUT"), (["--cpu"], 2, "usage"),
    ([], 2, "usage"), (["OUT"], 2, "no GPU was found"),
])  # fmt: skip
def test_no_folder_is_named_like_an_option_and_gpus_are_needed(tmp_path, script, arguments, status, words):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", SCRIPTS / script, *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == status and re.search(words, result.stderr if status else result.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


HELP = """
import contextlib, io, runpy, sys, traceback
for path in sys.argv[1:]:
    sys.argv, text, status, before = [path, "--help"], io.StringIO(), None, list(sys.path)
    sys.path.insert(0, path.rpartition("/")[0])
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.path[:] = before
    if status != 0 or "usage: " not in text.getvalue():
        print("no help:", path, status)
"""


def test_every_command_starts():
    """In one process, since what takes time is the import of torch."""
    pytest.importorskip("matplotlib")  # of the report
    files = [path for folder in (SCRIPTS, ROOT / "research_topic_2") for path in sorted(folder.glob("*.py"))]
    commands = [str(path) for path in files if '__name__ == "__main__"' in path.read_text()]
    commands.remove(str(SCRIPTS / "explain_demo.py"))  # a part of demo.sh, which gives it four numbers
    assert len(commands) >= 20
    result = subprocess.run([sys.executable, "-c", HELP, *commands], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout == "", result.stdout + result.stderr
