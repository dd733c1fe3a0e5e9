#!/usr/bin/env python3
r"""Fit the simulated machine to four measured configurations, and judge it on all the others.

    python scripts/calibrate.py [--json reports/results/simulated/calibration.json]

A configuration is one comparison record under `reports/results/h200x2-*`: a workload, a software stack, a link,
forward or forward and backward. Each of its modes is one latency, the slowest rank's median. Nine numbers
(`machines.Fitted`) are fitted, one to each of the latencies in `FITS`, out of four configurations: forward and
backward, compiled and eager, since no kernel was measured alone that gives the backward's; the forward over the slow
link, whose exchanges nothing hides; and the smallest shape, which is the host's time alone. The other numbers of a
machine are data sheets' or those of kernels measured alone (`compile_overlap/machines.py`).

Judged are all modes of the other configurations that the simulator knows: the sequential layer, the same without
communication, and the overlapped layer with its chunks, through collectives and the peers' memory. Left out: modes
whose order is not a schedule of ours (`naive`, Inductor's own passes, `with-sm`, `sm-free`), and the overlapped layer
of records older than its schedule (they name no variants). What `kernel` chose is not in a record: for the first ones
it is known (`PLANS`), else it is taken to be what the plan is now for that link. No number was fitted to a judged
latency; but the model's form was settled by people who had seen them, so records that came later judge it best.
Prints the table; with --json writes it, and the fitted numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

from rankmixer import record  # noqa: E402

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
    measured: dict[str, float]
    sent_bytes: int
    exchanges: int

    def machine(self, fitted: Fitted) -> Machine:
        return machines.machine(link=self.link, stack=self.stack, fitted=fitted)


def configurations() -> list[Configuration]:
    """The comparison records of two H200s whose software and link are known, by name."""
    read = (_read(path) for path in sorted(RESULTS.glob("h200x2-*/**/*.json")))
    return [found for found in read if found is not None]


def _read(path: Path) -> Configuration | None:
    content = json.loads(path.read_text())
    if content["kind"] != "comparison":
        return None
    option = {name: each["value"] for name, each in content["configuration"].items()}
    version = content["environment"]["torch"].partition("+")[0]
    stack = f"torch {version} {'eager' if option['no_compile'] else 'compiled'}"
    folder = path.relative_to(RESULTS).parts[0]
    link = {"shm": machines.SHARED_MEMORY, "tcp": machines.TCP}.get(folder.rpartition("-")[2], machines.NVLINK)
    if stack not in machines.STACKS or option["large_block"] or option.get("cuda_graph"):
        return None
    hidden = option["dim"] * option["k"] * option["compute_scale"]
    layout = Layout(content["world_size"], option["batch_size"], option["tokens"], option["dim"], hidden)
    measured = {mode: each["slowest_rank"]["p50_s"] for mode, each in content["measurements"].items()}
    itemsize = 4 if option["dtype"] in ("fp32", "float32") else 2
    exchange = content["exchange"]
    return Configuration(
        str(path.relative_to(RESULTS)), layout, link.name, stack, content["pass"] != "forward",
        content["environment"]["git_commit"], option["comm_scale"],
        itemsize, _settings(content), measured,
        exchange["bytes_sent_per_exchange"], exchange["exchanges"],
    )  # fmt: skip


def _settings(content: dict[str, Any]) -> dict[str, dict[str, str]] | None:
    """The plugin's settings of each mode but the reference's; None where the record is older than the schedule."""
    if "variants" not in content:
        return None
    changed = {mode: each["environment"] for mode, each in content["variants"].items() if not mode.startswith(NONE)}
    return {"kernel": {}, **changed}


def plan_of(found: Configuration, mode: str, machine: Machine) -> Plan | None:
    """The plan of a kernel mode, None for `none`. Raises KeyError for a mode that is not simulated."""
    name = mode.removeprefix("comp-only:")
    if name == NONE:
        return None
    settings = {key.removeprefix("A2A_FFN_"): value for key, value in (found.settings or {})[name].items()}
    if set(settings) - {"CHUNKS", "TRANSPORT", "OWN_FIRST", "STRICT"}:
        raise KeyError(mode)
    sizes = tuple(int(part) for part in settings.get("CHUNKS", "").split(",") if part)
    if not settings and found.commit.startswith(COMMITS):
        sizes = PLANS[found.link, found.training]
    asked = Settings(chunks=sizes[0]) if len(sizes) == 1 else Settings(sizes=sizes)
    if settings.get("TRANSPORT") == "peers":
        return plan.peer_plan(found.layout, "cuda", asked)
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
    lines += ["", f"{'judged':<78}{'measured':>10}{'simulated':>11}{'error':>9}"]
    for point in result["judged"]:
        name = f"{point['configuration'].removeprefix('h200x2-')}  {point['mode']}"
        times = f"{point['measured_s'] * 1e3:>10.3f}{point['simulated_s'] * 1e3:>11.3f}"
        lines.append(f"{name:<78}{times}{point['error']:>+9.1%}")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the calibration here")
    options = parser.parse_args()
    result = calibrate()
    print(table(result))
    if options.json:
        record.write(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
