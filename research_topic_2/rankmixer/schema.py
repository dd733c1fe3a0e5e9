"""What every kind of record must hold. `validate` is called before one is written, and on every committed one.

Kinds: ``full`` (the whole block), ``comp-only`` (exchanges removed; not a layer latency), ``comparison`` (several
modes, and variants of them as ``mode:variant``, measured in one run, see compare.py; those of many shapes in one file,
see results_file.py), ``overlap-measurement`` (a comparison with figures of what was hidden, and of device traces, see
scripts/measure.py), ``planner`` (all candidate plans of many shapes, see scripts/judge_planner.py), ``splits`` (the
local computation in parts on one device, see scripts/splits.py). ``calibration`` and ``simulation``
(scripts/calibrate.py, scripts/simulate.py) hold what was simulated, and say so: ``simulated`` is true. ``faults`` is
what a fault of one rank led to (scripts/faults.py), ``endurance`` what many calls left behind (scripts/endurance.py).
A ``trace`` (scripts/trace_overlap.py) has no version; what its kernels hold is `compile_overlap.measure.records`'.
"""

import json
import math
from pathlib import Path

SCHEMA_VERSION = 1
PASSES = ("forward", "forward+backward")
SPLIT_AXES = ("L", "rows", "H")
_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))
_ANY = {"schema": int, "kind": str}
_RUN = {**_ANY, "configuration": dict, "environment": dict, "world_size": int, "pass": str}
_COMMON = {**_RUN, "plugin": _TEXT_OR_NONE, "exchange": dict, "checks": dict, "peak_memory_bytes": list}
_SINGLE = {**_COMMON, "transport": _TEXT_OR_NONE, "samples_s": list, "rank0": dict, "slowest_rank": dict,
           "tokens_per_s": float, "forward_tflops": (float, type(None)), "full_batch": (dict, type(None)),
           "output_shape": list}
_COMPARISON = {**_COMMON, "rounds": int, "transports": dict, "measurements": dict, "summary": dict,
               "full_batch": dict}
_OVERLAP = {**_COMPARISON, "hiding": dict, "traces": dict, "trace_note": _TEXT_OR_NONE}
_PLANNER = {**_RUN, "settings": dict, "shapes": list, "geometric_means": dict}
_SPLITS = {**_ANY, "configuration": dict, "environment": dict, "recipe": str, "bias": str, "rounds": int,
           "splits": list}
_CALIBRATION = {**_ANY, "fitted": dict, "fitted_on": list, "judged": list, "configurations": dict,
                "median_error": float, "median_error_of_configurations": float, "median_error_of_overlapped": float}
_SIMULATION = {**_ANY, "calibration": str, "cases": list}
_FAULTS = {**_ANY, "environment": dict, "world_size": int, "timeout_s": float, "faults": list}
_FAULT = {"name": str, "fault": str, "at_fault": int, "ranks": list, "left_over": dict, "rerun": dict, "problems": list}
_SEEN = {"rank": int, "status": int, "seconds": (float, type(None)), "message": str}
_ENDURANCE = {**_ANY, "environment": dict, "world_size": int, "calls": int, "configurations": int, "kept": int,
              "ranks": list, "bounds": dict}
_TRACE = {"kind": str, "mode": str, "pass": str, "configuration": dict, "environment": dict, "ranks": list,
          "kernels": list}
_TRACED = dict.fromkeys(("span_us", "communication_us", "hidden_us"), _NUMBER)
_STACK = {"torch": str, "device": str, "git_commit": str}
_SIZES = ("batch_size", "tokens", "dim", "k", "comm_scale", "compute_scale")
_COUNTS = dict.fromkeys(("resident_bytes", "device_bytes", "files", "layers", "compilations"), int)
_VARIANTS = {"variants": dict, "failed": dict}  # of a comparison, absent from older records


def read(path):
    """The record in a file. Raises ValueError, which names the file, for what is none."""
    content = read_json(path)
    try:
        return validate(content)
    except ValueError as error:
        raise ValueError(f"{path}: is no record ({shortened(error)})") from None


def read_json(path):
    """The JSON value in a file. Raises ValueError, which names the file, for what is none."""
    try:
        return parsed(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error})") from None


def parsed(text):
    """The JSON value of a text. Raises ValueError for what is none, NaN and infinities among it."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def shortened(error):
    """An error's message, without most of a large value that it may show."""
    text = str(error)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _refuse_constant(name):
    raise ValueError(f"{name} is no number")


def validate(record):
    """Check a record against its schema; returns it.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if not isinstance(record, dict):
        raise ValueError(f"record={record!r}: must be an object")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"kind={kind!r}: allowed are {', '.join(_KINDS)}")
    fields, check = _KINDS[kind]
    _require_fields("record", record, fields)
    if "schema" in fields and record["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema={record['schema']}: must be {SCHEMA_VERSION}")
    if "pass" in fields and record["pass"] not in PASSES:
        raise ValueError(f"pass={record['pass']!r}: allowed are {', '.join(PASSES)}")
    if "environment" in fields:
        _require_fields("environment", record["environment"], _STACK)
    for name, setting in record["configuration"].items() if "configuration" in fields else ():
        if not isinstance(setting, dict) or "value" not in setting:
            raise ValueError(f"configuration.{name}={setting!r}: must be an object with a value")
        if name in _SIZES:
            _require_count(f"configuration.{name}", setting["value"])
    for name, value in record["exchange"].items() if "exchange" in fields else ():
        _require_count(f"exchange.{name}", value, least=0)
    try:
        check(record)
    except (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"kind={kind!r}: some field is not what such a record holds ({error!r})") from error
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


def _require_count(name, value, least=1):
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: must be a count of at least {least}")


def _check_single(record):
    _check_plan("plan", record.get("plan"))
    _check_measurement(record["kind"], record, record)


def _check_comparison(record):
    _check_variants(record)
    _check_plans(record)
    missing = {"none", *record["summary"]} - set(record["measurements"])
    if missing:
        raise ValueError(f"measurements={sorted(record['measurements'])}: must be of {', '.join(sorted(missing))} too")
    for name, measurement in record["measurements"].items():
        _check_measurement(name, measurement, record)


def _check_hiding(record):
    """Times are the measurements', fractions follow from them, a trace hides no more than it communicates."""
    _check_comparison(record)
    medians = {name: value["slowest_rank"]["p50_s"] for name, value in record["measurements"].items()}
    for mode, values in record["hiding"].items():
        times, slowest = values["slowest_rank"]["times_s"], values["slowest_rank"]
        if (times["serial"], times["overlap"]) != (medians["none"], medians.get(mode)):
            raise ValueError(f"hiding.{mode}.slowest_rank.times_s={times}: must be the medians of none and {mode}")
        communication, hidden = times["comm"], slowest["hidden_fraction"]
        expected = (times["serial"] - times["overlap"]) / communication if communication else None
        unknown = None in (hidden, expected)
        if hidden is not expected if unknown else not math.isclose(hidden, expected, abs_tol=1e-12):
            raise ValueError(f"hiding.{mode}.slowest_rank.hidden_fraction={hidden}: the times' is {expected}")
        if len(values["ranks"]) != record["world_size"]:
            raise ValueError(f"hiding.{mode}.ranks={values['ranks']}: must be of {record['world_size']} rank(s)")
    if set(record["traces"]) != set(record["hiding"]):
        raise ValueError(f"traces={sorted(record['traces'])}: must be of the modes {sorted(record['hiding'])}, or null")
    for mode, trace in record["traces"].items():
        if trace is None and not record["trace_note"]:
            raise ValueError(f"traces.{mode}=None: trace_note must say why there is none")
        for figures in trace["ranks"] if trace else ():
            _check_traced(f"traces.{mode}", figures)


def _check_trace(record):
    if not record["ranks"]:
        raise ValueError("ranks=[]: must be of one rank at least")
    for figures in record["ranks"]:
        _check_traced("ranks", figures)


def _check_traced(name, figures):
    """A trace hides no more than it communicates."""
    _require_fields(name, figures, _TRACED)
    if not 0 <= figures["hidden_us"] <= figures["communication_us"] <= figures["span_us"]:
        raise ValueError(f"{name}={figures}: must hold 0 <= hidden_us <= communication_us <= span_us")


def _check_planner(record):
    ratios = {}
    for row in record["shapes"]:
        shape = row["shape"]
        if not isinstance(shape, list) or len(shape) != 4 or not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(f"shapes: shape={shape!r}: must be [B, T, D, k]")
        seconds = {plan: percentile(sorted(samples), 50) for plan, samples in row["samples_s"].items()}
        for choice, plan in row["choices"].items():
            expected = seconds.get(plan, math.nan) / min(seconds.values())
            if not math.isclose(row["over_best"].get(choice, math.nan), expected):
                raise ValueError(f"{row['shape']}: over_best.{choice}: the samples' of {plan!r} is {expected}")
            ratios.setdefault(choice, []).append(expected)
    for choice, values in ratios.items():
        if not math.isclose(record["geometric_means"].get(choice, math.nan), geometric_mean(values)):
            raise ValueError(f"geometric_means.{choice}: the shapes' is {geometric_mean(values)}")
    return record


def _check_splits(record):
    """The whole comes first; every split has both passes, and all others are compared with the whole."""
    for index, row in enumerate(record["splits"]):
        name = f"splits[{index}]"
        axis, parts = row["axis"], row["parts"]
        if (axis not in SPLIT_AXES or parts < 2) if index else (axis, parts) != (None, 1):
            raise ValueError(f"{name}: axis={axis!r}, parts={parts}: must be null and 1 first, then one of "
                             f"{', '.join(SPLIT_AXES)} and at least 2")
        if set(row["passes"]) != set(PASSES) or bool(row["compared"]) != bool(index):
            raise ValueError(f"{name}: must have {' and '.join(PASSES)}, and be compared unless it is the whole")
        for each, times in row["passes"].items():
            samples = times["samples_s"]
            if not samples or not all(0 <= value < math.inf for value in samples):
                raise ValueError(f"{name}.{each}.samples_s={samples}: must be finite samples of at least 0 seconds")
            if not math.isclose(times["p50_s"], percentile(sorted(samples), 50)):
                raise ValueError(f"{name}.{each}.p50_s={times['p50_s']}: must be the samples' median")
        for tensor, verdict in row["compared"].items():
            if verdict["equal"] and verdict["relative_error"] != 0:
                raise ValueError(f"{name}.compared.{tensor}={verdict}: what is equal has no error")


def _check_simulated(record):
    if record.get("simulated") is not True:
        raise ValueError(f"simulated={record.get('simulated')!r}: must be true, since nothing here was measured alone")
    for name, value in record.get("fitted", {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"fitted.{name}={value!r}: must be a finite number above 0")
    for row in record["judged" if record["kind"] == "calibration" else "cases"]:
        times = {name: value for name, value in row.items() if name.endswith("_s")}
        if not times or not all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in times.values()):
            raise ValueError(f"{row!r}: must hold finite times of at least 0 seconds")


def _check_faults(record):
    """Every fault is of one of the ranks, and says what each of them saw."""
    for row in record["faults"]:
        _require_fields("faults", row, _FAULT)
        for seen in row["ranks"]:
            _require_fields(f"faults.{row['name']}.ranks", seen, _SEEN)
        ranks = [seen["rank"] for seen in row["ranks"]]
        if ranks != list(range(record["world_size"])) or row["at_fault"] not in ranks:
            raise ValueError(f"faults.{row['name']}: ranks {ranks} and at_fault {row['at_fault']}: must be of "
                             f"{record['world_size']} rank(s)")


def _check_endurance(record):
    """Every rank's counts after the first calls and after the last; the growth of each is within its bound."""
    if len(record["ranks"]) != record["world_size"]:
        raise ValueError(f"ranks={record['ranks']!r}: must be of {record['world_size']} rank(s)")
    _require_fields("bounds", record["bounds"], _COUNTS)
    for rank in record["ranks"]:
        for moment in ("warm", "last"):
            _require_fields(f"ranks.{moment}", rank[moment], _COUNTS)
        for name, bound in record["bounds"].items():
            growth = rank["last"][name] - rank["warm"][name]
            if growth > bound:
                raise ValueError(f"{name} grew by {growth}: must be at most {bound}")


def _check_variants(record):
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


def _check_plans(record):
    """What the plugin says that its modes ran with; absent from older records."""
    plans = record.get("plans", {})
    if not isinstance(plans, dict):
        raise ValueError(f"record field plans={plans!r}: must be {dict}")
    for name, plan in plans.items():
        if name not in record["summary"] or name.partition(":")[0] != "kernel":
            raise ValueError(f"plans.{name}={plan!r}: must be of a kernel mode of {', '.join(record['summary'])}")
        _check_plan(f"plans.{name}", plan)


def _check_plan(name, plan):
    if plan is not None and (not isinstance(plan, str) or not plan or "\n" in plan):
        raise ValueError(f"{name}={plan!r}: must be a line of text, or null")


def _check_measurement(name, measurement, record):
    samples = measurement.get("samples_s")
    if not isinstance(samples, list) or len(samples) != record["world_size"] or not all(samples):
        raise ValueError(f"{name}.samples_s={samples!r}: must hold non-empty samples of {record['world_size']} rank(s)")
    if len({len(row) for row in samples}) != 1 or any(not 0 < value < math.inf for row in samples for value in row):
        raise ValueError(f"{name}.samples_s: every rank must have equally many finite samples above 0 seconds")
    for key, expected in slowest_rank(samples).items():
        value = measurement.get("slowest_rank", {}).get(key)
        if value is None or not math.isclose(value, expected):
            raise ValueError(f"{name}.slowest_rank.{key}={value}: the samples' is {expected}")
    if record["pass"] == "forward+backward" and measurement.get("forward_tflops") is not None:
        raise ValueError(f"{name}.forward_tflops={measurement['forward_tflops']}: must be null when backward is timed")


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


def geometric_mean(ratios):
    """Of a non-empty list of positive numbers."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


_KINDS = {
    "full": (_SINGLE, _check_single), "comp-only": (_SINGLE, _check_single),
    "comparison": (_COMPARISON, _check_comparison), "overlap-measurement": (_OVERLAP, _check_hiding),
    "planner": (_PLANNER, _check_planner), "splits": (_SPLITS, _check_splits),
    "calibration": (_CALIBRATION, _check_simulated), "simulation": (_SIMULATION, _check_simulated),
    "faults": (_FAULTS, _check_faults), "endurance": (_ENDURANCE, _check_endurance), "trace": (_TRACE, _check_trace),
}
