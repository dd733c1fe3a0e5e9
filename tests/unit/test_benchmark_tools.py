"""The benchmark's checks, records, options and timing."""

import copy
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "research_topic_2"))

import compare  # noqa: E402
import preflight  # noqa: E402
from rankmixer import checks, cli, options, plugins, precision, record  # noqa: E402
from rankmixer import runtime  # noqa: E402
from rankmixer.runtime import Runtime, choose_device  # noqa: E402
from rankmixer.timing import Timer  # noqa: E402

CPU = torch.device("cpu")
SMALL = "--device cpu --no-compile --batch-size 3 --tokens 4 --dim 8 --k 2 --warmup 0 --num-tests 3 --no-l2-flush".split()


def parse(*arguments):
    parsed = cli.build_parser().parse_args(arguments)
    options.validate(parsed, 1, CPU)
    return parsed


def run_benchmark(tmp_path, *arguments):
    file = tmp_path / "record.json"
    assert cli.main([*SMALL, *arguments, "--json", str(file)]) == 0
    return __import__("json").loads(file.read_text())


def test_defaults_are_the_documented_ones():
    parsed = parse()
    expected = dict(batch_size=512, tokens=64, dim=1280, k=6, gemm_backend="bmm", fwd_mode="dense_v2",
                    bwd_mode="dense_v2", no_compile=False, overlap="none", warmup=50, num_tests=50,
                    check_correctness="none", backward=False, comp_only=False, comm_scale=1, compute_scale=1, seed=42,
                    large_block=False, dtype="bf16", l2_flush=True, prewarm_sleep_ms=10.0, cuda_graph=False)
    assert {name: getattr(parsed, name) for name in expected} == expected


def test_default_exchange_is_70_mib_and_flops_follow_the_shape():
    parsed = parse("--comm-scale", "2")
    exchange = record.exchange_bytes(parsed, 8)
    assert exchange["bytes_per_exchange"] == 70 * 2**20
    assert exchange["bytes_sent_per_exchange"] == 140 * 2**20
    peers, local = 8, 8
    assert record.forward_flops(parsed) == 2 * peers * 512 * local * (1280 * 2 * 7680 + 7680 * 1280)


@pytest.mark.parametrize("arguments, message", [
    (("--k", "0"), "k=0"), (("--batch-size", "0"), "batch_size=0"), (("--dim", "0"), "dim=0"),
    (("--comm-scale", "0"), "comm_scale=0"), (("--warmup", "-1"), "warmup=-1"), (("--tokens", "60"), "dim=1280"),
    (("--cuda-graph",), "cuda_graph=True"), (("--gemm-backend", "fp8"), "gemm_backend='fp8'"),
    (("--json", "/"), "json='/': must be a file"),
])
def test_options_reject(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


def test_tokens_must_divide_over_the_ranks():
    parsed = cli.build_parser().parse_args([])
    with pytest.raises(ValueError, match="tokens=64: must be a multiple of the number of ranks, 3"):
        options.validate(parsed, 3, CPU)


def test_a_mistake_exits_with_status_2(capsys):
    assert cli.main([*SMALL, "--k", "0"]) == 2
    assert "k=0" in capsys.readouterr().err


def test_a_setting_that_is_unfit_exits_with_status_2(capsys, monkeypatch):
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", "compile_overlap")
    monkeypatch.setenv("A2A_FFN_CHUNKS", "banana")
    assert cli.main([*SMALL, "--overlap", "kernel"]) == 2
    assert capsys.readouterr().err.startswith("error (rank 0): A2A_FFN_CHUNKS = banana: must be")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="device='cuda'"):
        choose_device("cuda")


@pytest.mark.parametrize("share, nccl, device", [
    (None, (2, 30), "at most one rank per GPU"), ("0", (2, 30), "at most one rank per GPU"), ("1", (2, 30), "cuda:1"),
    ("1", (2, 28, 9), "NCCL 2.28.9 lets no ranks share"), ("yes", (2, 30), "allowed are 0 and 1"),
])
def test_ranks_share_gpus_where_that_is_asked_for_and_nccl_lets_them(share, nccl, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(runtime, "nccl_version", lambda: nccl)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.delenv("A2A_SHARE_GPUS", raising=False)
    if share is not None:
        monkeypatch.setenv("A2A_SHARE_GPUS", share)
    if device == "cuda:1":
        assert choose_device("cuda") == torch.device(device)
    else:
        with pytest.raises(ValueError, match=device):
            choose_device("cuda")


@pytest.mark.parametrize("loaded", [True, False])
def test_the_version_is_that_of_the_nccl_that_is_loaded(loaded, monkeypatch):
    class Library:
        @staticmethod
        def ncclGetVersion(code):
            code._obj.value = 23007
            return 0

    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: Library if loaded else object())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5, "suffix"))
    assert runtime.nccl_version() == ((2, 30, 7) if loaded else (2, 21, 5))


def test_help_never_calls_the_forward_check_a_tolerance():
    text = cli.build_parser().format_help().lower()
    assert "tolerance" not in text and "torch.equal" in text


def test_record_marks_overrides_and_keeps_kinds_apart(tmp_path):
    full = run_benchmark(tmp_path)
    assert full["kind"] == "full" and full["forward_tflops"] > 0 and full["output_shape"] == [3, 4, 8]
    assert full["configuration"]["k"] == {"value": 2, "default": 6, "overridden": True}
    assert not full["configuration"]["seed"]["overridden"]
    assert len(full["samples_s"][0]) == 2
    assert run_benchmark(tmp_path, "--comp-only")["kind"] == "comp-only"
    backward = run_benchmark(tmp_path, "--backward")
    assert backward["pass"] == "forward+backward" and backward["forward_tflops"] is None


@pytest.mark.parametrize("field, value, message", [
    ("kind", "other", "kind='other'"), ("samples_s", [[]], "samples_s"), ("samples_s", [[math.nan]], "finite"),
    ("schema", 2, "schema=2"), ("slowest_rank", {"mean_s": 1.0}, "slowest_rank.mean_s=1.0: the samples' is"),
    ("tokens_per_s", "many", "tokens_per_s"),
    ("world_size", 2, "2 rank"), ("pass", "forward+backward", "forward_tflops"),
])
def test_record_schema_rejects(tmp_path, field, value, message):
    broken = {**run_benchmark(tmp_path), field: value}
    with pytest.raises(ValueError, match=message):
        record.validate(broken)
    del broken[field]
    with pytest.raises(ValueError, match=field):
        record.validate(broken)


@pytest.mark.parametrize("name", ["mean_s", "p50_s", "p90_s", "p99_s", "max_rank_median_s"])
@pytest.mark.parametrize("change", [lambda value: value / 2, lambda value: -1, lambda value: None, lambda value: "x"])
def test_statistics_are_those_of_the_samples(tmp_path, name, change):
    result = run_benchmark(tmp_path)
    result["slowest_rank"][name] = change(result["slowest_rank"][name])
    with pytest.raises(ValueError, match=f"slowest_rank.{name}=|some field is not"):
        record.validate(result)


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, '{"a": NaN}', "[]", '{"kind": "full", "schema": 1}'],
                         ids=range(6))
def test_a_file_that_holds_no_record_is_named(tmp_path, text):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError, match=r"some.json: is no (record|JSON) \("):
        record.read(tmp_path / "some.json")


@pytest.mark.parametrize("plan", ["", 8, "8\n8"])
def test_a_plan_is_a_line_of_text_or_null_or_absent(tmp_path, plan):
    result = run_benchmark(tmp_path)
    assert result["plan"] is None
    record.validate({**result, "plan": "8,8 r4 a2 b1 s0"})
    with pytest.raises(ValueError, match="must be a line of text, or null"):
        record.validate({**result, "plan": plan})
    del result["plan"]
    record.validate(result)


def test_a_plugin_need_not_name_its_plans(tmp_path, monkeypatch):
    import compile_overlap

    assert plugins.load_plan_of() is compile_overlap.plan_of
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", "sequential_plugin")
    assert plugins.load_plan_of() is None
    assert run_benchmark(tmp_path, "--overlap", "kernel")["plan"] is None
    with pytest.raises(ValueError, match="must define tune"):
        plugins.load_tune()


def test_slowest_rank_takes_the_maximum_of_each_iteration():
    statistics = record.slowest_rank([[1.0, 4.0, 1.0], [2.0, 1.0, 2.0]])
    assert statistics["mean_s"] == pytest.approx(8 / 3)
    assert statistics["p50_s"] == 2.0 and statistics["max_rank_median_s"] == 2.0
    assert record.percentile([0.0, 10.0], 90) == 9.0


def test_hidden_fraction_stays_negative_for_a_slower_mode():
    def measured(seconds):
        return {"slowest_rank": {"p50_s": seconds}}

    summary = compare.summarize({"none": measured(10.0), "kernel": measured(12.0), "comp-only:none": measured(7.0),
                                 "exchanges": measured(4.0)}, ["none", "kernel"])
    assert summary["kernel"]["hidden_fraction"] == -0.5
    assert summary["kernel"]["exposed_s"] == 5.0


@pytest.mark.parametrize("nccl, device, shown, last", [
    ("2.21.5", "NVIDIA H200", "0.833x   -50.0%   5000000.0", "hidden = "),
    ("2.30.7", "shared NVIDIA H200", "0.833x        -           -", "these times mean nothing"),
    (None, "x86_64 CPU", "0.833x        -           -", "hidden and exposed mean nothing on CPU"),
])
def test_what_is_hidden_is_not_shown_where_something_is_shared(nccl, device, shown, last):
    seconds = {"none": 10.0, "kernel": 12.0, "comp-only:none": 7.0, "exchanges": 4.0}
    measurements = {name: {"slowest_rank": {"p50_s": value}, "tokens_per_s": 1.0, "forward_tflops": None,
                           "peak_memory_bytes": [None]} for name, value in seconds.items()}
    text = compare.table({"pass": "forward", "world_size": 2, "rounds": 1, "environment": {"nccl": nccl, "device": device}, "failed": {},
                          "measurements": measurements, "summary": compare.summarize(measurements, ["none", "kernel"]),
                          "checks": {}, "transports": {}, "plans": {}})
    assert shown in next(line for line in text.splitlines() if line.startswith("kernel"))
    assert text.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("modes", ["kernel", "none,none", "none,fast"])
def test_comparison_rejects_modes(modes):
    with pytest.raises(ValueError, match="modes="):
        compare.parse_modes(modes)


def test_timer_drops_the_first_of_several_samples():
    timer = Timer(Runtime(0, 1, CPU, None), l2_flush=False, prewarm_sleep=0)
    calls = []
    timing, output = timer.measure(lambda: calls.append(1) or torch.ones(2), warmup=2, num_tests=4)
    assert len(calls) == 6 and len(timing.samples) == 3 and output.tolist() == [1, 1]
    assert timing.min <= timing.mean <= timing.max
    assert len(timer.measure(lambda: torch.ones(1), warmup=0, num_tests=1)[0].samples) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulp_distance_counts_representable_values(dtype):
    one = torch.ones(1, dtype=dtype)
    above = torch.nextafter(one.float(), one.float() * 2) if dtype == torch.float32 else one + torch.finfo(dtype).eps
    assert precision.ulp_distance(above.to(dtype), one).item() == 1
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert precision.ulp_distance(zeros, zeros.flip(0)).tolist() == [0, 0]
    tiny = torch.tensor([torch.finfo(dtype).tiny], dtype=dtype)
    assert precision.ulp_distance(tiny, -tiny).item() == 2 * precision.ulp_distance(tiny, zeros[:1]).item()


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)])
def test_approx_limits_each_gradient_and_bitwise_none(dtype, limit):
    expected = {"w": torch.ones(100, dtype=dtype)}
    inside, outside = ({"w": (torch.ones(100) * (1 + factor * limit)).to(dtype)} for factor in (0.7, 1.6))
    assert checks.compare_gradients(expected, copy.deepcopy(expected), "bitwise", dtype)[0] == ""
    assert checks.compare_gradients(expected, inside, "approx", dtype)[0] == ""
    assert "gradient of w: relative error" in checks.compare_gradients(expected, outside, "approx", dtype)[0]
    assert "100 of 100 elements" in checks.compare_gradients(expected, inside, "bitwise", dtype)[0]


def test_gradient_check_fails_on_nan_zero_reference_and_missing_keys():
    zero, small = {"w": torch.zeros(4)}, {"w": torch.full((4,), 1e-15)}
    assert checks.compare_gradients(zero, {"w": torch.full((4,), math.nan)}, "approx", torch.float32)[0]
    assert checks.frobenius_relative_error(small["w"], zero["w"]) == pytest.approx(2e-3)
    assert "only in one path ['b']" in checks.compare_gradients(zero, {**zero, "b": zero["w"]}, "approx",
                                                                torch.float32)[0]


def test_a_record_goes_through_a_pipe_or_link_and_leaves_it(tmp_path):
    content = {"schema": 1, "kind": "simulation", "simulated": True, "calibration": "", "cases": []}
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    record.write(content, tmp_path / "pipe")
    assert json.loads(os.read(reader, 1 << 16)) == content and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")  # as /dev/stdout is one
    record.write(content, tmp_path / "link")
    assert json.loads((tmp_path / "file").read_text()) == content and (tmp_path / "link").is_symlink()
    record.write(content, tmp_path / "new" / "file.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.json"]


@pytest.mark.parametrize("wrong, error", [(math.nan, None), (-math.inf, None), (1.0, 0.5), (None, 0.0)])
def test_a_full_batch_that_is_not_finite_can_be_recorded(wrong, error):
    inputs = torch.tensor([math.inf, 0.5, 0.5])

    def run_forward(mode, x, grad):
        return torch.cat((x[:2], torch.tensor([wrong]))) if mode == "kernel" and wrong is not None else x.clone()

    workload = SimpleNamespace(inputs=inputs, options=SimpleNamespace(backward=False), run_forward=run_forward,
                               runtime=Runtime(0, 1, CPU, None))
    found = checks.compare_full_batch(workload, "kernel")
    json.dumps(found, allow_nan=False)
    assert found == {"equal": wrong is None, "mismatches": int(wrong is not None), "max_abs_error": error}


def test_equal_infinities_are_equal_gradients():
    gradients = {"w": torch.tensor([math.inf, 1.0])}
    problem, found = checks.compare_gradients(gradients, copy.deepcopy(gradients), "approx", torch.float32)
    assert problem == "" and found["w"]["relative_error"] == found["w"]["max_abs_error"] == 0.0
    spoiled = {"w": torch.tensor([math.inf, 2.0])}
    assert checks.compare_gradients(gradients, spoiled, "approx", torch.float32)[0]


@pytest.mark.parametrize("change, overlap, words", [
    ({}, "kernel", ""), ({"large_block": True}, "kernel", "large-block"), ({"comp_only": True}, "sm-free", "comp-only"),
    ({"check_correctness": "none"}, "with-sm", "off"), ({}, "none", "reference itself"),
])
def test_checks_run_exactly_when_documented(change, overlap, words):
    settings = SimpleNamespace(**{"check_correctness": "approx", "large_block": False, "comp_only": False, **change})
    reason = checks.reason_to_skip(settings, overlap)
    assert bool(reason) == bool(words) and words in reason


def test_cpu_preflight_passes_and_notices_a_wrong_block(monkeypatch, capsys):
    assert preflight.main(["--target", "cpu"]) == 0
    monkeypatch.setattr(preflight.RankMixerBlock, "forward", lambda self, x: self.norm2(x + self.ffn(x)) + self.norm1(x))
    assert preflight.main(["--target", "cpu"]) == 1
    assert "FAIL float32 output" in capsys.readouterr().out


@pytest.mark.parametrize("rank, said", [("0", True), ("1", False)])
def test_help_and_mistakes_are_said_once(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    for arguments, status in ((["--help"], 0), (["--overlap", "nothing"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.build_parser().parse_args(arguments)
        printed = capsys.readouterr()
        assert ended.value.code == status and bool(printed.out + printed.err) == said


def test_public_check_says_why_one_gpu_is_not_shared(monkeypatch, capsys):
    import public_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("A2A_SHARE_GPUS", "yes")
    assert public_check.main([]) == 2
    assert capsys.readouterr().err == "error: A2A_SHARE_GPUS='yes': allowed are 0 and 1\n"
