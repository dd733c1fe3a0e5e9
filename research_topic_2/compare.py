"""Measures several overlap modes in one run, interleaved in rounds, and compares them. Launch with torchrun.

Every round measures each mode, the comp-only layer and the isolated exchanges once, with the same block, inputs and
settings, so that drift of clocks and links meets all of them. Reported per mode, from the slowest rank of each
iteration: median latency; speed-up over none; hidden fraction (T_none - T_mode) / T_comm, negative where a mode is
slower; exposed communication T_mode - T_comp-only.

Besides modes, ``--modes`` takes variants of them, ``mode:variant`` (see rankmixer/variants.py): what Inductor's own
passes make of the layer, other chunk counts, the chunked layer without our schedule. Each is checked against none and
compiled apart. A variant that does not compile or run is reported as failed and left out. One that fails its check is
measured and reported; the run ends with status 1 then.
"""

import contextlib

import torch
import torch.distributed as dist

from rankmixer import plans, plugins, record, variants
from rankmixer.checks import CHECK_ROWS, check_shape, compare_full_batch, reason_to_skip, run_checks
from rankmixer.cli import guarded, make_timer, pass_name, prepare, print_setup
from rankmixer.ffn import OVERLAP_MODES
from rankmixer.options import RanksParser, add_common_options, configuration
from rankmixer.pipelines import transport_in_use
from rankmixer.runtime import environment_rank, leave
from rankmixer.tuning import add_tune_option, require_tunable, tune

EXCHANGES = "exchanges"
COMP_ONLY = "comp-only:"


def build_parser():
    """The comparison's command line: the benchmark's flags, with a list of modes instead of one."""
    parser = RanksParser(prog="compare.py", description=__doc__)
    parser.add_argument("--modes", default="none,with-sm,sm-free,kernel",
                        help="comma-separated modes, none among them, and variants of them as mode:variant. Of none "
                             "and kernel: inductor-reorder, inductor-overlap, inductor-overlap-nodeps (Inductor's own "
                             "passes instead of ours; not with --no-compile). Of kernel: naive (chunked, unscheduled), "
                             "sequential (one chunk), chunks=4 or chunks=8+16+8, peers, settings such as "
                             "TRANSPORT=peers+CHUNKS=8/24. E.g. none,kernel,kernel:naive,none:inductor-reorder (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--own-comp-only", action="store_true",
                        help="also measure the kernel plugin's own comp-only path")
    add_tune_option(parser)
    add_common_options(parser)
    parser.set_defaults(comp_only=False)
    return parser


def parse_modes(text, no_compile=False):
    """Split ``--modes``. Raises ValueError unless the names are known, distinct, can run here, and contain none."""
    names = text.split(",")
    if (not {name.partition(variants.SEPARATOR)[0] for name in names} <= set(OVERLAP_MODES)
            or len(set(names)) != len(names) or "none" not in names):
        raise ValueError(f"modes={text!r}: must be distinct names of {', '.join(OVERLAP_MODES)}, or mode:variant, with "
                         f"none among them")
    for index, name in enumerate(names):
        variants.require_compilation(name, no_compile)
        twice = next((each for each in names[:index] if variants.parse(each).same_as(variants.parse(name))), None)
        if twice:
            raise ValueError(f"modes={text!r}: {twice} and {name} are the same")
    return names


def main(arguments=None):
    """Run the comparison; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)

    def prepare_run():
        return prepare(options, {variants.parse(name).mode for name in check_modes(options)})

    return guarded(prepare_run, lambda workload: _run(parser, options, workload))


def check_modes(options):
    """The modes of a command line. Raises ValueError unless they and what goes with them can be run."""
    modes = parse_modes(options.modes, options.no_compile)
    if options.rounds < 1:
        raise ValueError(f"rounds={options.rounds}: must be at least 1")
    require_tunable(options, set(modes), environment_rank()[1])
    if options.own_comp_only and "kernel" not in modes:
        raise ValueError(f"own_comp_only=True: needs kernel among modes={options.modes!r}")
    return modes


def _run(parser, options, workload):
    result = compare(parser, options, workload)
    workload.runtime.print(table(result))
    if options.json and workload.runtime.is_main:
        record.write(result, options.json)
    workload.runtime.barrier()
    wrong = [mode for mode, outcome in result["checks"].items() if "problem" in outcome]
    if wrong:
        raise AssertionError(f"check failed: {', '.join(wrong)}")


def compare(parser, options, workload):
    """Check and measure the modes of ``options`` on one workload; returns the record. All ranks call it alike."""
    runtime, asked = workload.runtime, [variants.parse(name) for name in parse_modes(options.modes)]
    print_setup(runtime, parser, options)
    tuning = tune(workload)
    primed = {variant.name: variants.prime(workload, variant.name, first_calls(workload, variant.name))
              for variant in asked if not variant.plain}
    failed = {name: problem for name, problem in primed.items() if problem}
    modes = [variant.name for variant in asked if variant.name not in failed]
    others = [mode for mode in modes if mode != "none"]
    checks = {mode: check(workload, mode) for mode in others}
    full_batch = {mode: compare_full_batch(workload, mode) for mode in others} if options.full_batch_check else {}
    before = record.peak_memory(runtime.device)
    measurements = {name: _measurement(name, runtime.gather(own), options)
                    for name, own in measure_rounds(workload, modes).items()}
    return record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "comparison", "configuration": configuration(parser, options),
        "environment": record.environment(runtime.device), "world_size": runtime.world_size,
        "pass": pass_name(options), "rounds": options.rounds,
        "plugin": plugins.plugin_name() if any(variant.mode == "kernel" for variant in asked) else None,
        "transports": {mode: transport_in_use(variants.parse(mode).mode, runtime.group) for mode in others},
        "variants": {variant.name: variant.describe() for variant in asked if not variant.plain}, "failed": failed,
        "plans": {mode: plans.plan_of(workload, mode) for mode in modes if variants.parse(mode).mode == "kernel"},
        "exchange": record.exchange_bytes(options, runtime.world_size), "checks": checks, "full_batch": full_batch,
        "peak_memory_bytes": _fullest(runtime.gather(before), measurements),
        "measurements": measurements, "summary": summarize(measurements, modes), "tuning": tuning})


def first_calls(workload, name):
    """The calls that compile a variant: the measured one, and those of the checks that will run."""
    options, x = workload.options, workload.inputs.detach()
    calls = [workload.timed_call(name)]
    if not reason_to_skip(options, name):
        part = x[:CHECK_ROWS]
        calls.append(lambda: workload.run_forward(name, part, grad=options.backward))
        if options.backward:
            calls.append(lambda: workload.run_gradients(name, part, part))
    if options.full_batch_check:
        calls.append(lambda: workload.run_forward(name, x, grad=options.backward))
    return calls


def check(workload, name):
    """Check one mode or variant; a variant's failure is its outcome. Raises AssertionError for a mode's."""
    try:
        return run_checks(workload, name)
    except AssertionError as error:
        if variants.parse(name).plain:
            raise
        workload.runtime.print(f"{name}: {error}")
        return {"ran": True, "mode": workload.options.check_correctness, "problem": str(error)}


def measure_rounds(workload, modes):
    """Measure everything ``--rounds`` times, interleaved.

    Returns {name: (this rank's samples in seconds, the most bytes that were allocated meanwhile, or None on CPU)}.
    """
    options = workload.options
    calls = {mode: workload.timed_call(mode) for mode in modes}
    calls[COMP_ONLY + "none"] = workload.timed_call("none", comp_only=True)
    if options.own_comp_only:
        calls[COMP_ONLY + "kernel"] = workload.timed_call("kernel", comp_only=True)
    if workload.runtime.world_size > 1:
        calls[EXCHANGES] = exchange_call(workload)
    timer = make_timer(options, workload.runtime)
    per_round = -(-options.num_tests // options.rounds) + 1
    samples, peaks, device = {name: [] for name in calls}, {name: None for name in calls}, workload.runtime.device
    for index in range(options.rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            warmup = min(options.warmup, 2) if index else options.warmup
            with variants.parse(name).applied() if name in modes else contextlib.nullcontext():
                timing, output = timer.measure(call, warmup=warmup, num_tests=per_round, before=workload.clear_gradients)
            samples[name] += timing.samples
            if device.type == "cuda":
                peaks[name] = max(peaks[name] or 0, torch.cuda.max_memory_allocated(device))
            if name != EXCHANGES:
                check_shape(workload, output)
        workload.runtime.print(f"round {index + 1} of {options.rounds} done")
    return {name: (samples[name], peaks[name]) for name in calls}


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


def _measurement(name, ranks, options):
    samples, peaks = (list(values) for values in zip(*ranks))
    statistics = record.slowest_rank(samples)
    median = statistics["p50_s"]
    layer = name != EXCHANGES
    return {"samples_s": samples, "slowest_rank": statistics, "peak_memory_bytes": peaks,
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
    """The comparison as text; times are slowest-rank medians in microseconds.

    Where exchanges and GEMMs share cores (on CPU) or ranks a GPU, what is hidden and what is exposed is not shown.
    """
    measurements, on_gpus = result["measurements"], result["environment"]["nccl"] is not None
    alone = on_gpus and not result["environment"]["device"].startswith("shared")
    width = max(18, *(len(name) + 2 for name in (*measurements, *result["failed"])))
    lines = [f"\n{result['pass']}, P={result['world_size']}, slowest-rank medians over {result['rounds']} rounds",
             f"{'mode':<{width}}{'median us':>12}{'speed-up':>10}{'hidden':>9}{'exposed us':>12}"
             f"{'tokens/s':>12}{'TFLOP/s':>10}{'peak MiB':>10}"]
    for mode, values in result["summary"].items():
        measured = measurements[mode]
        hidden = values["hidden_fraction"] if alone else None
        exposed, rate = values["exposed_s"] if alone else None, measured["forward_tflops"]
        lines.append(f"{mode:<{width}}{values['median_s'] * 1e6:>12.1f}{values['speedup_over_none']:>9.3f}x"
                     f"{'-' if hidden is None else format(hidden, '.1%'):>9}"
                     f"{'-' if exposed is None else format(exposed * 1e6, '.1f'):>12}"
                     f"{measured['tokens_per_s']:>12.4g}{'-' if rate is None else format(rate, '.3g'):>10}"
                     f"{_mebibytes(measured['peak_memory_bytes']):>10}")
    lines += [f"{name:<{width}}{'failed':>12}  {problem}" for name, problem in result["failed"].items()]
    lines += [f"{name:<{width}}{value['slowest_rank']['p50_s'] * 1e6:>12.1f}" for name, value in measurements.items()
              if name not in result["summary"]]
    lines += [f"note: {name} is not what none computes: {outcome['problem']}"
              for name, outcome in result["checks"].items() if "problem" in outcome]
    fallbacks = [mode for mode, transport in result["transports"].items()
                 if mode == "sm-free" and transport == "collective"]
    lines += [f"note: {mode} fell back to the with-sm transport here" for mode in fallbacks]
    lines += [f"plan of {mode}: {plan}" for mode, plan in result["plans"].items() if plan is not None]
    lines.append("hidden = (T_none - T_mode) / T_exchanges, an estimate; exposed = T_mode - T_comp-only of none" if alone
                 else "these times mean nothing: ranks share a GPU" if on_gpus
                 else "hidden and exposed mean nothing on CPU, where exchanges and GEMMs share the cores")
    return "\n".join(lines)


def _fullest(before, measurements):
    """Per rank the most bytes of the whole run; measuring resets the count of each mode."""
    columns = [before, *(value["peak_memory_bytes"] for value in measurements.values())]
    return [max(peak for peak in row if peak is not None) for row in zip(*columns)]


def _mebibytes(peaks):
    return "-" if None in peaks else f"{max(peaks) / 2**20:.0f}"


if __name__ == "__main__":
    leave(main())
