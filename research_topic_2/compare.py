"""Measures several overlap modes in one run, interleaved in rounds, and compares them. Launch with torchrun.

Every round measures each mode, the comp-only layer and the isolated exchanges once, with the same block, inputs and
settings, so that drift of clocks and links meets all of them. Reported per mode, from the slowest rank of each
iteration: median latency; speed-up over none; hidden fraction (T_none - T_mode) / T_comm, negative where a mode is
slower; exposed communication T_mode - T_comp-only.
"""

import argparse
import sys

import torch
import torch.distributed as dist

from rankmixer import plugins, record
from rankmixer.checks import check_shape, compare_full_batch, run_checks
from rankmixer.cli import guarded, make_timer, pass_name, prepare, print_setup
from rankmixer.ffn import OVERLAP_MODES
from rankmixer.options import add_common_options, configuration
from rankmixer.pipelines import transport_in_use

EXCHANGES = "exchanges"
COMP_ONLY = "comp-only:"


def build_parser():
    """The comparison's command line: the benchmark's flags, with a list of modes instead of one."""
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__)
    parser.add_argument("--modes", default="none,with-sm,sm-free,kernel",
                        help="comma-separated modes, none among them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--own-comp-only", action="store_true",
                        help="also measure the kernel plugin's own comp-only path")
    add_common_options(parser)
    parser.set_defaults(comp_only=False)
    return parser


def parse_modes(text):
    """Split ``--modes``. Raises ValueError unless the names are known, distinct, and contain none."""
    modes = text.split(",")
    if not set(modes) <= set(OVERLAP_MODES) or len(set(modes)) != len(modes) or "none" not in modes:
        raise ValueError(f"modes={text!r}: must be distinct names of {', '.join(OVERLAP_MODES)}, with none among them")
    return modes


def main(arguments=None):
    """Run the comparison; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)

    def prepare_run():
        modes = parse_modes(options.modes)
        if options.rounds < 1:
            raise ValueError(f"rounds={options.rounds}: must be at least 1")
        if options.own_comp_only and "kernel" not in modes:
            raise ValueError(f"own_comp_only=True: needs kernel among modes={options.modes!r}")
        return prepare(options, modes)

    return guarded(prepare_run, lambda workload: _run(parser, options, workload))


def _run(parser, options, workload):
    runtime, modes = workload.runtime, parse_modes(options.modes)
    print_setup(runtime, parser, options)
    others = [mode for mode in modes if mode != "none"]
    checks = {mode: run_checks(workload, mode) for mode in others}
    full_batch = {mode: compare_full_batch(workload, mode) for mode in others} if options.full_batch_check else {}
    samples = measure_rounds(workload, modes)
    measurements = {name: _measurement(name, runtime.gather(own), options) for name, own in samples.items()}
    result = record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "comparison", "configuration": configuration(parser, options),
        "environment": record.environment(runtime.device), "world_size": runtime.world_size,
        "pass": pass_name(options), "rounds": options.rounds,
        "plugin": plugins.plugin_name() if "kernel" in modes else None,
        "transports": {mode: transport_in_use(mode, runtime.group) for mode in others},
        "exchange": record.exchange_bytes(options, runtime.world_size), "checks": checks, "full_batch": full_batch,
        "peak_memory_bytes": runtime.gather(record.peak_memory(runtime.device)),
        "measurements": measurements, "summary": summarize(measurements, modes)})
    runtime.print(table(result))
    if options.json and runtime.is_main:
        record.write(result, options.json)
    runtime.barrier()


def measure_rounds(workload, modes):
    """Measure everything ``--rounds`` times, interleaved. Returns {name: this rank's samples in seconds}."""
    options = workload.options
    calls = {mode: workload.timed_call(mode) for mode in modes}
    calls[COMP_ONLY + "none"] = workload.timed_call("none", comp_only=True)
    if options.own_comp_only:
        calls[COMP_ONLY + "kernel"] = workload.timed_call("kernel", comp_only=True)
    if workload.runtime.world_size > 1:
        calls[EXCHANGES] = exchange_call(workload)
    timer = make_timer(options, workload.runtime)
    per_round = -(-options.num_tests // options.rounds) + 1
    samples = {name: [] for name in calls}
    for index in range(options.rounds):
        for name, call in calls.items():
            timing, output = timer.measure(call, warmup=min(options.warmup, 2) if index else options.warmup,
                                           num_tests=per_round, before=workload.clear_gradients)
            samples[name] += timing.samples
            if name != EXCHANGES:
                check_shape(workload, output)
        workload.runtime.print(f"round {index + 1} of {options.rounds} done")
    return samples


def exchange_call(workload):
    """The layer's exchanges alone: dispatch and combine, twice with ``--backward``, on buffers packed beforehand."""
    options, peers = workload.options, workload.runtime.world_size
    shape = (peers, options.batch_size, options.tokens // peers, options.dim * options.comm_scale)
    send = torch.zeros(shape, dtype=workload.dtype, device=workload.runtime.device)
    received = torch.empty_like(send)
    count = record.exchange_bytes(options, peers)["exchanges"]

    def exchange():
        for _ in range(count):
            dist.all_to_all_single(received, send, group=workload.runtime.group)
        return received

    return exchange


def _measurement(name, samples, options):
    statistics = record.slowest_rank(samples)
    median = statistics["p50_s"]
    layer = name != EXCHANGES
    return {"samples_s": samples, "slowest_rank": statistics,
            "tokens_per_s": record.tokens_per_second(options, len(samples), median) if layer else None,
            "forward_tflops": record.forward_tflops(options, median) if layer else None}


def summarize(measurements, modes):
    """Per mode: median, speed-up over none, hidden fraction (None at P=1), exposed communication. Seconds."""
    median = {name: value["slowest_rank"]["p50_s"] for name, value in measurements.items()}
    communication = median.get(EXCHANGES)
    summary = {}
    for mode in modes:
        saved = median["none"] - median[mode]
        summary[mode] = {
            "median_s": median[mode], "speedup_over_none": median["none"] / median[mode],
            "hidden_fraction": saved / communication if communication else None,
            "exposed_s": median[mode] - median[COMP_ONLY + "none"],
        }
        if COMP_ONLY + mode in median and mode != "none":
            summary[mode]["exposed_own_s"] = median[mode] - median[COMP_ONLY + mode]
    return summary


def table(result):
    """The comparison as text; times are slowest-rank medians in microseconds."""
    measurements = result["measurements"]
    lines = [f"\n{result['pass']}, P={result['world_size']}, slowest-rank medians over {result['rounds']} rounds",
             f"{'mode':<18}{'median us':>12}{'speed-up':>10}{'hidden':>9}{'exposed us':>12}"
             f"{'tokens/s':>12}{'TFLOP/s':>10}"]
    for mode, values in result["summary"].items():
        measured = measurements[mode]
        hidden, rate = values["hidden_fraction"], measured["forward_tflops"]
        lines.append(f"{mode:<18}{values['median_s'] * 1e6:>12.1f}{values['speedup_over_none']:>9.3f}x"
                     f"{'-' if hidden is None else format(hidden, '.1%'):>9}{values['exposed_s'] * 1e6:>12.1f}"
                     f"{measured['tokens_per_s']:>12.4g}{'-' if rate is None else format(rate, '.3g'):>10}")
    lines += [f"{name:<18}{value['slowest_rank']['p50_s'] * 1e6:>12.1f}" for name, value in measurements.items()
              if name not in result["summary"]]
    fallbacks = [mode for mode, transport in result["transports"].items()
                 if mode == "sm-free" and transport == "collective"]
    lines += [f"note: {mode} fell back to the with-sm transport here" for mode in fallbacks]
    lines.append("hidden = (T_none - T_mode) / T_exchanges, an estimate; exposed = T_mode - T_comp-only of none")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
