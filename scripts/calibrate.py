#!/usr/bin/env python3
r"""Fit the simulated machine to four measured configurations, and judge it on all the others.

    python scripts/calibrate.py [--json reports/results/simulated/calibration.json]
    python scripts/calibrate.py --predict FOLDER    # its records: measured, and simulated with the numbers as they are

A configuration is one comparison record under `reports/results/h200x2-*`: a workload, a software stack, a link,
forward or forward and backward. Each of its modes is one latency, the slowest rank's median. Nine numbers
(`machines.Fitted`) are fitted, one to each of the latencies in `FITS`, out of four configurations: forward and
backward, compiled and eager, since no kernel was measured alone that gives the backward's; the forward over the slow
link, whose exchanges nothing hides; and the smallest shape, which is the host's time alone. The other numbers of a
machine are data sheets' or those of kernels measured alone (`compile_overlap/machines.py`).

Judged are all modes of the other configurations that the simulator knows: the sequential layer, the same without
communication, and the overlapped layer with its chunks, through collectives and the peers' memory. Left out: modes
whose order is not a schedule of ours (`naive`, Inductor's own passes, `with-sm`, `sm-free`), and the overlapped layer
of records older than its schedule (they name no variants). A record names the plan of each mode; of older ones that do
not, the first are known (`PLANS`), for others the plan is taken to be what it is now for that link. No number was
fitted to a judged latency; but the model's form was settled by people who had seen them, so records that came later
judge it best. Prints the table; with --json writes it, and the fitted numbers.

With --predict nothing is fitted: comparisons and single runs, of one host's GPUs and NVLink unless the folder's name
says otherwise, are held against the model. What is left out is named: a record of another GPU or software than the
modelled ones, and a file that holds none.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

from rankmixer import record, schema  # noqa: E402

from compile_overlap import machines, plan  # noqa: E402
from compile_overlap.config import Settings  # noqa: E402
from compile_overlap.costs import Costs, rounded  # noqa: E402
from compile_overlap.layout import Layout  # noqa: E402
from compile_overlap.machines import FITTED, PROBE_SHARE, Fitted, Machine  # noqa: E402
from compile_overlap.schedule import Plan  # noqa: E402
from compile_overlap.simulate import Case, simulate  # noqa: E402

RESULTS = ROOT / "reports" / "results"
SHARED_MEMORY_FORWARD = "h200x2-torch-2.11.0-shm/overlap.json"
NVLINK_BACKWARD = "h200x2-torch-2.11.0/overlap_backward.json"
EAGER_BACKWARD = "h200x2-torch-2.11.0/default_eager_backward.json"
SMALL_EAGER = "h200x2-torch-2.11.0/small_eager/4x16x128x2.json"
NONE, COMP_ONLY, EXCHANGES = "none", "comp-only:none", "exchanges"
FITS = (  # in this order: a number depends on those above it
    ("shared_memory_bytes_per_s", SHARED_MEMORY_FORWARD, EXCHANGES),
    ("nvlink_bytes_per_s", NVLINK_BACKWARD, EXCHANGES),
    ("latency_s", SHARED_MEMORY_FORWARD, NONE),
    ("inductor_backward", NVLINK_BACKWARD, COMP_ONLY),
    ("aten_backward", EAGER_BACKWARD, COMP_ONLY),
    ("eager_launch_s", SMALL_EAGER, COMP_ONLY),
    ("eager_collective_s", SMALL_EAGER, NONE),
    ("peer_s", SMALL_EAGER, "kernel:peers"),
    ("own_backward", NVLINK_BACKWARD, "kernel:peers"),
)
# What `kernel` ran at these commits, default workload: link, training. Their traces show as many chunks.
COMMITS = ("c629428", "a843f9a")
PLANS = {
    (machines.NVLINK.name, False): (4, 12, 12, 4),
    (machines.NVLINK.name, True): (16, 16),
    (machines.SHARED_MEMORY.name, False): (4, 8, 8, 8, 4),
    (machines.SHARED_MEMORY.name, True): (8, 16, 8),
}
DIGITS = 3  # of a fitted number that are kept
TARGET_ERROR, TARGET_CONFIGURATIONS = 0.10, 12


class Configuration(NamedTuple):
    """One record: what ran, where, and the measured latencies in seconds by mode."""

    name: str
    layout: Layout
    link: str
    stack: str
    training: bool
    commit: str
    comm_scale: int
    itemsize: int
    settings: dict[str, dict[str, str]] | None
    plans: dict[str, str | None]
    measured: dict[str, float]
    sent_bytes: int
    exchanges: int
    gpu: str

    def machine(self, fitted: Fitted) -> Machine:
        return machines.machine(self.gpu, self.link, self.stack, fitted=fitted)


def configurations() -> list[Configuration]:
    """The comparison records of two H200s whose software and link are known, by name."""
    found = []
    for path in sorted(RESULTS.glob("h200x2-torch-*/**/*.json")):  # not of several nodes on one host
        content = schema.read_json(path)
        if _is_of(content, "comparison") and _obstacle(content) is None:
            found.append(_configuration(content, path))
    return found


def _is_of(content: Any, *kinds: str) -> bool:
    return isinstance(content, dict) and content.get("kind") in kinds


def _obstacle(content: dict[str, Any]) -> str | None:
    """Why a record's modes are not simulated, or None."""
    option, environment = _options(content), content["environment"]
    if _gpu(environment["device"]) is None:
        return f"no model of {environment['device']}"
    if _stack(content) not in machines.STACKS:
        return f"no model of {_stack(content)}"
    unknown = [name for name in ("large_block", "cuda_graph") if option.get(name)]
    return f"no model of {unknown[0]}" if unknown else None


def _options(content: dict[str, Any]) -> dict[str, Any]:
    return {name: each["value"] for name, each in content["configuration"].items()}


def _stack(content: dict[str, Any]) -> str:
    version = content["environment"]["torch"].partition("+")[0]
    return f"torch {version} {'eager' if _options(content)['no_compile'] else 'compiled'}"


def _gpu(device: str) -> str | None:
    return next((name for name in machines.GPUS if re.match(rf"NVIDIA {name}\b", device)), None)


def _link(path: Path) -> str:
    """By the folder in which a record lies: NVLink unless its name ends otherwise."""
    ends = {part.rpartition("-")[2] for part in path.parts[:-1]}
    known = {"shm": machines.SHARED_MEMORY, "tcp": machines.TCP}
    return next((link.name for end, link in known.items() if end in ends), machines.NVLINK.name)


def _configuration(content: dict[str, Any], path: Path) -> Configuration:
    option = _options(content)
    hidden = option["dim"] * option["k"] * option["compute_scale"]
    layout = Layout(content["world_size"], option["batch_size"], option["tokens"], option["dim"], hidden)
    if "measurements" in content:
        statistics_of, plans = content["measurements"], content.get("plans", {})
    else:
        mode = f"{'comp-only:' if content['kind'] == 'comp-only' else ''}{option['overlap']}"
        statistics_of, plans = {mode: content}, {option["overlap"]: content.get("plan")}
    measured = {mode: each["slowest_rank"]["p50_s"] for mode, each in statistics_of.items()}
    itemsize = 4 if option["dtype"] in ("fp32", "float32") else 2
    exchange = content["exchange"]
    return Configuration(
        str(path.relative_to(RESULTS) if path.is_relative_to(RESULTS) else path.name), layout, _link(path),
        _stack(content), content["pass"] != "forward", content["environment"]["git_commit"], option["comm_scale"],
        itemsize, _settings(content), plans, measured,
        exchange["bytes_sent_per_exchange"], exchange["exchanges"], _gpu(content["environment"]["device"]),
    )  # fmt: skip


def _settings(content: dict[str, Any]) -> dict[str, dict[str, str]] | None:
    """The plugin's settings of each mode but the reference's; None where the record is older than the schedule."""
    if "variants" not in content and "plan" not in content:
        return None
    variants = content.get("variants", {})
    return {"kernel": {}, **{mode: each["environment"] for mode, each in variants.items() if not mode.startswith(NONE)}}


def plan_of(found: Configuration, mode: str, machine: Machine) -> Plan | None:
    """The plan of a kernel mode, None for `none`. Raises KeyError for a mode that is not simulated."""
    name = mode.removeprefix("comp-only:")
    if name == NONE:
        return None
    settings = {key.removeprefix("A2A_FFN_"): value for key, value in (found.settings or {})[name].items()}
    if set(settings) - {"CHUNKS", "TRANSPORT", "OWN_FIRST", "HEAD", "STRICT"}:
        raise KeyError(mode)
    if name in found.plans:
        if found.plans[name] is None:  # the reference answered
            raise KeyError(mode)
        return Plan.parse(found.plans[name])
    sizes = tuple(int(part) for part in settings.get("CHUNKS", "").split(",") if part)
    if not settings and found.commit.startswith(COMMITS):
        sizes = PLANS[found.link, found.training]
    asked = Settings(chunks=sizes[0]) if len(sizes) == 1 else Settings(sizes=sizes)
    if settings.get("TRANSPORT") == "peers":
        return plan.peer_plan(found.layout, "cuda", replace(asked, head=0), found.training, found.itemsize)
    costs = Costs(machine.local.latency_s, machine.local.bytes_per_s, machine.gpu.flops_per_s * PROBE_SHARE)
    return plan.make_plan(found.layout, found.itemsize, "cuda", found.training, asked, rounded(costs))


def predicted(found: Configuration, mode: str, fitted: Fitted) -> float:
    """Simulated seconds of a mode. Raises KeyError for one that is not simulated."""
    machine = found.machine(fitted)
    if mode == EXCHANGES:
        return found.exchanges * found.sent_bytes / machine.local.bytes_per_s
    chosen = plan_of(found, mode, machine)
    exchanged = not mode.startswith("comp-only:")
    case = Case(machine, found.layout, chosen, found.training, found.itemsize, found.comm_scale, exchanged)
    return simulate(case).total


def fit(known: dict[str, Configuration]) -> Fitted:
    """The numbers with which the latencies in `FITS` come out as measured."""
    fitted = FITTED
    for name, file, mode in FITS:
        found = known[file]

        def error(value: float) -> float:
            return predicted(found, mode, fitted._replace(**{name: value})) - found.measured[mode]

        fitted = fitted._replace(**{name: float(f"{_root(error, getattr(FITTED, name)):.{DIGITS}g}")})
    return fitted


def _root(error: Callable[[float], float], near: float) -> float:
    """Where a monotonous function is zero, by halving the logarithm between a hundredth and a hundred times `near`.

    The end that is nearer to zero where it has no root between them.
    """
    low, high = near / 100, near * 100
    if error(low) * error(high) > 0:
        return min((low, high), key=lambda value: abs(error(value)))
    rising = error(high) > error(low)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if (error(middle) > 0) == rising else (middle, high)
    return (low * high) ** 0.5


def judge(found: Configuration, fitted: Fitted) -> Iterator[dict[str, Any]]:
    """Prediction and relative error of each mode that is simulated."""
    for mode, seconds in found.measured.items():
        if mode == EXCHANGES:
            continue
        try:
            simulated = predicted(found, mode, fitted)
        except KeyError:
            continue
        yield {"configuration": found.name, "mode": mode, "measured_s": seconds, "simulated_s": round(simulated, 9),
               "error": round(simulated / seconds - 1, 6)}  # fmt: skip


def calibrate() -> dict[str, Any]:
    """The whole calibration as a record."""
    known = {found.name: found for found in configurations()}
    fitted = fit(known)
    fitted_on = sorted({file for _, file, _ in FITS})
    points = [point for found in known.values() if found.name not in fitted_on for point in judge(found, fitted)]
    errors = {name: statistics.median(abs(p["error"]) for p in points if p["configuration"] == name)
              for name in dict.fromkeys(p["configuration"] for p in points)}  # fmt: skip
    return record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "calibration", "simulated": True,
        "fitted": fitted._asdict(),
        "fitted_on": [dict(zip(("parameter", "configuration", "mode"), each)) for each in FITS],
        "judged": points, "configurations": errors,
        "median_error_of_overlapped": statistics.median(
            abs(p["error"]) for p in points if p["mode"].startswith("kernel")),
        "median_error": statistics.median(abs(point["error"]) for point in points),
        "median_error_of_configurations": statistics.median(errors.values()),
    })  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The calibration as text; times in milliseconds."""
    lines = ["SIMULATED against measured on two H200s", "", "fitted"]
    for each in result["fitted_on"]:
        value = result["fitted"][each["parameter"]]
        lines.append(f"  {each['parameter']:<27}{value:>12.4g}   {each['mode']} of {each['configuration']}")
    lines += ["", *_beside("judged", result["judged"])]
    errors = result["configurations"]
    within = sum(error <= TARGET_ERROR for error in errors.values())
    lines += [
        "",
        f"median error {result['median_error']:.1%} of {len(result['judged'])} latencies, "
        f"{result['median_error_of_overlapped']:.1%} of the overlapped layers' alone",
        f"by configuration {result['median_error_of_configurations']:.1%} of {len(errors)}, {within} within "
        f"{TARGET_ERROR:.0%} (target: {TARGET_ERROR:.0%} in the median, on {TARGET_CONFIGURATIONS} or more)",
    ]
    return "\n".join(lines)


def _beside(title: str, points: list[dict[str, Any]]) -> list[str]:
    """A line for each latency, in milliseconds: measured, simulated, and the error."""
    names = [f"{point['configuration'].removeprefix('h200x2-')}  {point['mode']}" for point in points]
    width = max(map(len, (title, *names))) + 2
    lines = [f"{title:<{width}}{'measured':>10}{'simulated':>11}{'error':>9}"]
    for name, point in zip(names, points):
        times = f"{point['measured_s'] * 1e3:>10.3f}{point['simulated_s'] * 1e3:>11.3f}"
        lines.append(f"{name:<{width}}{times}{point['error']:>+9.1%}")
    return lines


def predict(folder: Path) -> str:
    """The latencies of a folder's records beside the simulator's, as text."""
    points, refused = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            content = schema.read_json(path)
            reason = "it holds no times of modes"
            if _is_of(content, "comparison", "full", "comp-only"):
                reason = _obstacle(record.validate(content))
                points += [] if reason else judge(_configuration(content, path), FITTED)
        except ValueError as error:
            reason = schema.shortened(error)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            reason = f"some field is not what such a record holds ({error!r})"
        if reason:
            refused.append(f"{path.name}: not simulated, {reason}")
    head = f"SIMULATED beside measured, ms; fitted on two H200s, {len(points)} latencies"
    return "\n".join([head, *(_beside("record, mode", points) if points else []), *refused])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the calibration here")
    parser.add_argument("--predict", type=Path, metavar="FOLDER", help="only hold its records against the model")
    options = parser.parse_args()
    if options.predict:
        if not options.predict.is_dir():
            parser.error(f"predict={str(options.predict)!r}: must be a folder of records")
        print(predict(options.predict))
        return 0
    result = calibrate()
    print(table(result))
    if options.json:
        record.write(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
