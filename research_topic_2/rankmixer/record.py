"""The JSON records: what a run was, where it ran, and every rank's raw samples.

Kinds: ``full`` (the whole block), ``comp-only`` (exchanges removed; not a layer latency), and ``comparison``
(several modes, and variants of them as ``mode:variant``, measured in one run, see compare.py), ``sweep`` (ratios
of many comparisons, see sweep.py), ``faults`` (what a fault of one rank led to, scripts/faults.py), and ``endurance``
(what many calls left behind, scripts/endurance.py).
"""

import json
import os
import math
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

import torch

SCHEMA_VERSION = 1
KINDS = ("full", "comp-only", "comparison", "sweep", "faults", "endurance")
_TEXT_OR_NONE = (str, type(None))
_COMMON = {"schema": int, "kind": str, "configuration": dict, "environment": dict, "world_size": int, "pass": str,
           "plugin": _TEXT_OR_NONE, "exchange": dict, "checks": dict, "peak_memory_bytes": list}
_SINGLE = {**_COMMON, "transport": _TEXT_OR_NONE, "samples_s": list, "rank0": dict, "slowest_rank": dict,
           "tokens_per_s": float, "forward_tflops": (float, type(None)), "full_batch": (dict, type(None)),
           "output_shape": list}
_COMPARISON = {**_COMMON, "rounds": int, "transports": dict, "measurements": dict, "summary": dict,
               "full_batch": dict}
_SWEEP = {"schema": int, "kind": str, "environment": dict, "world_size": int, "pass": str, "shapes": str, "modes": dict}
_FAULTS = {"schema": int, "kind": str, "environment": dict, "world_size": int, "timeout_s": float, "faults": list}
_FAULT = {"name": str, "fault": str, "at_fault": int, "ranks": list, "left_over": dict, "rerun": dict, "problems": list}
_SEEN = {"rank": int, "status": int, "seconds": (float, type(None)), "message": str}
_ENDURANCE = {"schema": int, "kind": str, "environment": dict, "world_size": int, "calls": int, "configurations": int,
              "ranks": list, "bounds": dict}
_COUNTS = ("resident_bytes", "device_bytes", "files", "layers", "compilations")
_VARIANTS = {"variants": dict, "failed": dict}  # of a comparison, absent from older records
_STATISTICS = ("mean_s", "p50_s", "p90_s", "p99_s", "max_rank_median_s")


def environment(device):
    """Versions, device and commit of this run."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(), "torch": torch.__version__, "cuda_build": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "triton": _version("triton"), "numpy": _version("numpy"),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine() + " CPU",
        "git_commit": _git_commit(),
    }


def slowest_rank(samples):
    """Statistics in seconds of per-rank ``samples`` (one list per rank, equally long).

    Mean and percentiles are of the slowest rank per iteration; ``max_rank_median_s`` is the largest of the ranks'
    medians.
    """
    worst = sorted(max(column) for column in zip(*samples, strict=True))
    return {"mean_s": sum(worst) / len(worst), "p50_s": percentile(worst, 50), "p90_s": percentile(worst, 90),
            "p99_s": percentile(worst, 99), "max_rank_median_s": max(percentile(sorted(row), 50) for row in samples)}


def percentile(ordered, percent):
    """Linear-interpolated percentile of a sorted, non-empty list."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def exchange_bytes(options, world_size):
    """Bytes that one dispatch or combine sends per rank, the local slice excluded."""
    itemsize = options.torch_dtype.itemsize
    payload = options.batch_size * options.tokens * options.dim * itemsize * (world_size - 1) // world_size
    return {"bytes_per_exchange": payload, "bytes_sent_per_exchange": payload * options.comm_scale,
            "exchanges": 4 if options.backward else 2}


def forward_flops(options):
    """Floating-point operations of one rank's two forward GEMMs (a multiply-add counts as two).

    Per rank, P*B rows meet L = T/P tokens: 2 * B*T * (D*2H + H*D) = 6*B*T*D*H.
    """
    hidden = options.dim * options.k * options.compute_scale
    return 6 * options.batch_size * options.tokens * options.dim * hidden


def forward_tflops(options, seconds):
    """Per-rank forward TFLOP/s, or None when the time includes a backward."""
    return None if options.backward else forward_flops(options) / seconds / 1e12


def tokens_per_second(options, world_size, seconds):
    """Tokens that the whole group finishes per second."""
    return world_size * options.batch_size * options.tokens / seconds


def peak_memory(device):
    """Peak bytes of this rank: allocated on the GPU, or resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def validate(record):
    """Check a record against its schema; returns it.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if not isinstance(record, dict):
        raise ValueError(f"record={record!r}: must be an object")
    kind = record.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: allowed are {', '.join(KINDS)}")
    fields = {"comparison": _COMPARISON, "sweep": _SWEEP, "faults": _FAULTS, "endurance": _ENDURANCE}.get(kind, _SINGLE)
    _require_fields("record", record, fields)
    if record["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema={record['schema']}: must be {SCHEMA_VERSION}")
    if kind in ("faults", "endurance"):
        return _validate_faults(record) if kind == "faults" else _validate_endurance(record)
    if record["pass"] not in ("forward", "forward+backward"):
        raise ValueError(f"pass={record['pass']!r}: allowed are forward, forward+backward")
    if kind == "sweep":
        return _validate_sweep(record)
    if kind == "comparison":
        _validate_variants(record)
    measurements = record["measurements"] if kind == "comparison" else {kind: record}
    for name, measurement in measurements.items():
        _validate_measurement(name, measurement, record)
    return record


def _require_fields(name, value, fields):
    """Raise ValueError unless ``value`` is an object with these fields, each of its type or one of them."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r}: must be an object")
    for field, expected in fields.items():
        if field not in value:
            raise ValueError(f"{name} field {field!r} is missing")
        if not isinstance(value[field], expected) or isinstance(value[field], bool):
            raise ValueError(f"{name} field {field}={value[field]!r}: must be {expected}")


def _validate_faults(record):
    for row in record["faults"]:
        _require_fields("faults", row, _FAULT)
        for seen in row["ranks"]:
            _require_fields(f"faults.{row['name']}.ranks", seen, _SEEN)
        if [seen["rank"] for seen in row["ranks"]] != list(range(record["world_size"])):
            raise ValueError(f"faults.{row['name']}.ranks={row['ranks']!r}: must be of {record['world_size']} rank(s)")
        if not 0 <= row["at_fault"] < record["world_size"]:
            raise ValueError(f"faults.{row['name']}.at_fault={row['at_fault']}: must be one of the ranks")
    return record


def _validate_endurance(record):
    """Every rank's counts after the first calls and after the last; the growth of each within its bound."""
    if len(record["ranks"]) != record["world_size"]:
        raise ValueError(f"ranks={record['ranks']!r}: must be of {record['world_size']} rank(s)")
    _require_fields("bounds", record["bounds"], dict.fromkeys(_COUNTS, int))
    for rank in record["ranks"]:
        _require_fields("ranks", rank, {"warm": dict, "last": dict})
        for moment in ("warm", "last"):
            _require_fields(f"ranks.{moment}", rank[moment], dict.fromkeys(_COUNTS, int))
        for name in _COUNTS:
            growth = rank["last"][name] - rank["warm"][name]
            if growth > record["bounds"][name]:
                raise ValueError(f"{name} grew by {growth}: the bound is {record['bounds'][name]}")
    return record


def _validate_sweep(record):
    for mode, values in record["modes"].items():
        _require_fields(f"modes.{mode}", values, {"shapes": list, "geometric_mean": float})
        for row in values["shapes"]:
            _require_fields(f"modes.{mode}.shapes", row, dict.fromkeys(("low", "ratio", "high"), (int, float)))
        ratios = [(row["low"], row["ratio"], row["high"]) for row in values["shapes"]]
        if not ratios or not all(0 < low <= high < math.inf and 0 < ratio < math.inf for low, ratio, high in ratios):
            raise ValueError(f"modes.{mode}.shapes={values['shapes']!r}: must hold positive ratios and their intervals")
        mean = math.exp(sum(math.log(ratio) for _, ratio, _ in ratios) / len(ratios))
        if not math.isclose(mean, values["geometric_mean"]):
            raise ValueError(f"modes.{mode}.geometric_mean={values['geometric_mean']}: the shapes' is {mean}")
    return record


def _validate_variants(record):
    for name, expected in _VARIANTS.items():
        if not isinstance(record.get(name, {}), expected):
            raise ValueError(f"record field {name}={record[name]!r}: must be {expected}")
    known, failed = record.get("variants", {}), record.get("failed", {})
    for name in (*record["summary"], *failed):
        if ":" in name and name not in known:
            raise ValueError(f"{name}: is not among the record's variants {sorted(known)}")
    for name, problem in failed.items():
        if not isinstance(problem, str) or not problem or name in record["measurements"]:
            raise ValueError(f"failed.{name}={problem!r}: must be the error of a variant that has no measurement")


def _validate_measurement(name, measurement, record):
    _require_fields(name, measurement, {"samples_s": list, "slowest_rank": dict})
    samples = measurement["samples_s"]
    whole = len(samples) == record["world_size"] and all(isinstance(row, list) and row for row in samples)
    if not whole or not all(type(value) in (int, float) for row in samples for value in row):
        raise ValueError(f"{name}.samples_s={samples!r}: must hold non-empty samples of {record['world_size']} rank(s)")
    if len({len(row) for row in samples}) != 1 or any(not 0 <= value < math.inf for row in samples for value in row):
        raise ValueError(f"{name}.samples_s: every rank must have equally many finite samples of at least 0 seconds")
    _require_fields(f"{name}.slowest_rank", measurement["slowest_rank"], dict.fromkeys(_STATISTICS, (int, float)))
    if record["pass"] == "forward+backward" and measurement.get("forward_tflops") is not None:
        raise ValueError(f"{name}.forward_tflops={measurement['forward_tflops']}: must be null when backward is timed")


def read(path):
    """The record in a file.

    Raises:
        ValueError: naming the file, where it is no JSON or no valid record.
    """
    try:
        return validate(json.loads(Path(path).read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(record, path):
    """Validate and write a record as JSON, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(validate(record), indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit():
    """HEAD of the checkout; an exported tree without one is named by GIT_COMMIT."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"
