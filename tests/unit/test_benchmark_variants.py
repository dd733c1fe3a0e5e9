"""Variants of a mode in a comparison: how they are written, what they change, what happens when one fails."""

import os
import re
from types import SimpleNamespace

import compare
import pytest
import torch
from rankmixer import checks, compiling, record, variants
from rankmixer.runtime import Runtime
from torch._inductor import config as inductor_config

OVERLAP_SCHEDULING = hasattr(getattr(inductor_config, "aten_distributed_optimizations", None),
                             "enable_overlap_scheduling")

NAIVE = "inplace-gradients,pin-order,reorder,reserve-sms,share-kernels"


def test_a_mode_by_itself_changes_nothing():
    variant = variants.parse("kernel")
    assert variant.plain and variant.describe() == {"environment": {}, "inductor_config": {}}


@pytest.mark.parametrize("name, variable, value", [
    ("kernel:naive", "A2A_FFN_DISABLE_PASSES", NAIVE),
    ("kernel:sequential", "A2A_FFN_CHUNKS", "1"), ("kernel:sequential", "A2A_FFN_TRANSPORT", "collectives"),
    ("kernel:chunks=4", "A2A_FFN_CHUNKS", "4"),
    ("kernel:chunks=2+14", "A2A_FFN_CHUNKS", "2,14"), ("kernel:peers", "A2A_FFN_TRANSPORT", "peers"),
    ("kernel:peers=4+28", "A2A_FFN_TRANSPORT", "peers"), ("kernel:peers=4+28", "A2A_FFN_CHUNKS", "4,28"),
    ("kernel:inductor-reorder", "A2A_FFN_DISABLE_PASSES", NAIVE),
    ("kernel:TRANSPORT=peers+CHUNKS=8/24", "A2A_FFN_CHUNKS", "8,24"),
    ("kernel:PLANS=/tmp/x", "A2A_FFN_PLANS", "/tmp/x"), ("kernel:GEMMS=cublas", "A2A_FFN_GEMMS", "cublas"),
])
def test_kernel_variants_are_strict_settings_of_the_layer(monkeypatch, name, variable, value):
    from compile_overlap.config import Settings

    environment = variants.parse(name).environment
    assert environment[variable] == value and environment["A2A_FFN_STRICT"] == "1"
    for each, text in environment.items():
        monkeypatch.setenv(each, text)
    assert Settings.from_environment().strict


def test_variants_of_none_leave_the_environment_alone():
    variant = variants.parse("none:inductor-reorder")
    assert not variant.environment and variant.inductor_config["reorder_for_compute_comm_overlap"] is True
    assert variant.inductor_config["reorder_for_compute_comm_overlap_passes"]


@pytest.mark.parametrize("name, message", [
    ("kernel:fast", "'fast' is not a variant"), ("kernel:", "'' is not a variant"),
    ("none:naive", "is a variant of kernel"), ("with-sm:inductor-reorder", "is a variant of none and kernel"),
    ("none:chunks=4", "is a variant of kernel"), ("kernel:chunks=", "positive count"),
    ("kernel:peers=", "positive count"), ("none:peers", "is a variant of kernel"),
    ("kernel:CHUNKS", "is not a variant"), ("kernel:CHUNKS=4+", "is not a variant"),
    ("kernel:CHUNKS=2+CHUNKS=4", "distinct settings"), ("kernel:KERNEL_PLUGIN=x", "distinct settings"),
    ("none:GEMMS=cublas", "is a variant of kernel"), ("kernel:chunks=0", "positive count"), ("kernel:chunks=4,4", "positive count"),
    ("kernel:chunks=٤", "positive count"), ("kernel:peers=04", "positive count"),
])
def test_parse_refuses(name, message):
    with pytest.raises(ValueError, match=message):
        variants.parse(name)


@pytest.mark.parametrize("modes", ["kernel:naive", "none,kernel:naive,kernel:naive", "none,fast:naive", "none,:naive"])
def test_comparison_rejects_modes_with_variants(modes):
    with pytest.raises(ValueError, match="modes="):
        compare.parse_modes(modes)


@pytest.mark.parametrize("modes", ["none,kernel:chunks=4,kernel:CHUNKS=4", "none,kernel:peers,kernel:TRANSPORT=peers",
                                   "none,kernel:sequential,kernel:TRANSPORT=collectives+CHUNKS=1"])
def test_one_variant_under_two_names_is_refused(modes):
    with pytest.raises(ValueError, match=re.escape(" and ".join(modes.split(",")[1:]) + " are the same")):
        compare.parse_modes(modes)


def test_inductor_variants_need_compilation():
    with pytest.raises(ValueError, match="--no-compile"):
        compare.parse_modes("none,none:inductor-reorder", no_compile=True)
    assert compare.parse_modes("none,kernel:naive,kernel:chunks=2", no_compile=True)[1:] == ["kernel:naive",
                                                                                           "kernel:chunks=2"]


@pytest.mark.skipif(OVERLAP_SCHEDULING, reason="this torch has overlap scheduling")
def test_overlap_scheduling_is_refused_where_there_is_none(capsys):
    with pytest.raises(ValueError, match="has no overlap scheduling"):
        variants.parse("none:inductor-overlap")
    assert compare.main(["--device", "cpu", "--modes", "none,none:inductor-overlap"]) == 2
    assert "has no overlap scheduling" in capsys.readouterr().err


@pytest.mark.skipif(not OVERLAP_SCHEDULING, reason="this torch has no overlap scheduling")
@pytest.mark.parametrize("name, deps", [("inductor-overlap", True), ("inductor-overlap-nodeps", False)])
def test_overlap_scheduling_settings_exist(name, deps):
    settings = variants.parse(f"kernel:{name}").inductor_config
    assert settings["aten_distributed_optimizations.insert_overlap_deps"] is deps
    with inductor_config.patch(settings):
        assert inductor_config.aten_distributed_optimizations.max_in_flight_gb == 1024


def test_environment_holds_during_a_call_only(monkeypatch):
    monkeypatch.setenv("A2A_FFN_CHUNKS", "3")
    monkeypatch.delenv("A2A_FFN_STRICT", raising=False)

    def call(fails):
        assert os.environ["A2A_FFN_CHUNKS"] == "4" and os.environ["A2A_FFN_STRICT"] == "1"
        if fails:
            raise RuntimeError

    around = variants.parse("kernel:chunks=4").around(call)
    around(False)
    with pytest.raises(RuntimeError):
        around(True)
    assert os.environ["A2A_FFN_CHUNKS"] == "3" and "A2A_FFN_STRICT" not in os.environ


def test_inductor_settings_hold_for_forward_and_lazily_compiled_backward(monkeypatch):
    from torch._inductor import graph

    seen = []
    lower = graph.GraphLowering.run

    def run(self, *arguments):
        seen.append((self.is_backward, inductor_config.reorder_for_peak_memory))
        return lower(self, *arguments)

    def sine(x):
        return x.sin()

    monkeypatch.setattr(graph.GraphLowering, "run", run)
    with inductor_config.patch(force_disable_caches=True):
        compiled = compiling.compile_fresh(sine, {"reorder_for_peak_memory": False})
        output = compiled(torch.ones(3, requires_grad=True))
        assert inductor_config.reorder_for_peak_memory
        output.sum().backward()
    assert seen == [(False, False), (True, False)]


def test_prime_reports_the_compilers_own_error(capsys):
    def backend(graph, example_inputs):
        raise AssertionError("Detected unscheduled nodes\nand more")

    cleared = []
    workload = SimpleNamespace(runtime=Runtime(0, 1, torch.device("cpu"), None),
                               clear_gradients=lambda: cleared.append(1))
    failing = torch.compile(lambda x: x + 1, backend=backend)
    problem = variants.prime(workload, "kernel:naive", [lambda: failing(torch.ones(1))])
    assert problem == "AssertionError: Detected unscheduled nodes"
    assert "kernel:naive failed on rank(s) [0]" in capsys.readouterr().out
    assert variants.prime(workload, "kernel:naive", [lambda: None]) == "" and len(cleared) == 2


def test_variants_of_none_are_checked():
    settings = SimpleNamespace(check_correctness="approx", large_block=False, comp_only=False)
    assert checks.reason_to_skip(settings, "none:inductor-reorder") == ""


COMPARISON = ("--device cpu --no-compile --batch-size 3 --tokens 4 --dim 8 --k 2 --warmup 0 --num-tests 3 "
              "--no-l2-flush --rounds 1 --check-correctness approx").split()


def run_comparison(monkeypatch, tmp_path, forward):
    """A comparison at P=1 whose plugin is ``forward(block_ffn, inputs)``; (exit status, record)."""
    from rankmixer import plugins

    def plugin(ffn, inputs, *, comp_only=False):
        return forward(ffn, inputs)

    monkeypatch.setattr(plugins, "load_plugin", lambda: plugin)
    file = tmp_path / "record.json"
    status = compare.main([*COMPARISON, "--modes", "none,kernel,kernel:naive,kernel:chunks=2", "--json", str(file)])
    return status, __import__("json").loads(file.read_text())


def test_a_variant_that_fails_is_reported_and_the_others_measured(monkeypatch, tmp_path, capsys):
    def forward(ffn, inputs):
        if os.environ.get("A2A_FFN_DISABLE_PASSES"):
            raise RuntimeError("no such order")
        return ffn(inputs)

    status, result = run_comparison(monkeypatch, tmp_path, forward)
    assert status == 0 and result["failed"] == {"kernel:naive": "RuntimeError: no such order"}
    assert set(result["summary"]) == {"none", "kernel", "kernel:chunks=2"}
    assert result["checks"]["kernel:chunks=2"]["ran"]
    assert result["variants"]["kernel:chunks=2"]["environment"]["A2A_FFN_CHUNKS"] == "2"
    assert "failed  RuntimeError: no such order" in capsys.readouterr().out


def test_a_variant_that_computes_something_else_is_measured_and_fails_the_run(monkeypatch, tmp_path, capsys):
    def forward(ffn, inputs):
        return ffn(inputs) + (1 if os.environ.get("A2A_FFN_CHUNKS") else 0)

    status, result = run_comparison(monkeypatch, tmp_path, forward)
    assert status == 1 and not result["failed"]
    assert "differs from none" in result["checks"]["kernel:chunks=2"]["problem"]
    assert "kernel:chunks=2" in result["measurements"] and "problem" not in result["checks"]["kernel:naive"]
    assert "note: kernel:chunks=2 is not what none computes" in capsys.readouterr().out


@pytest.mark.parametrize("field, value, message", [
    ("failed", {"kernel:chunks=2": "slow"}, "has no measurement"),
    ("failed", {"kernel:naive": ""}, "must be the error"),
    ("variants", {}, "is not among the record's variants"), ("variants", [], "variants="),
    ("plans", {"none": "8 r4 a2 b1 s0"}, "must be of a kernel mode"), ("plans", {"kernel": ""}, "must be a line of"),
    ("plans", {"kernel:sequential": None}, "must be of a kernel mode"), ("plans", [], "plans="),
])
def test_record_schema_rejects_wrong_variants(monkeypatch, tmp_path, field, value, message):
    _, result = run_comparison(monkeypatch, tmp_path, lambda ffn, inputs: ffn(inputs))
    assert result["plans"] == dict.fromkeys(("kernel", "kernel:naive", "kernel:chunks=2"))  # one rank exchanges nothing
    old = {name: each for name, each in result.items() if name not in ("variants", "failed", "plans")}
    old["summary"] = {name: each for name, each in old["summary"].items() if ":" not in name}
    record.validate(old)
    with pytest.raises(ValueError, match=message):
        record.validate({**result, field: value})
