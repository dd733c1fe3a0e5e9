"""Numerical checks of an overlap mode against ``overlap=none``.

The forward check always uses ``torch.equal``, whatever the check mode is called. The mode concerns gradients:
``bitwise`` compares them with ``torch.equal`` too, ``approx`` bounds each gradient's Frobenius relative error. Both
run on min(B, 2) rows per rank. Reference and candidate run in the same grad mode and are compiled alike.
"""

import math
from dataclasses import asdict, dataclass

import torch

from rankmixer import variants
from rankmixer.precision import difference, ulp_statistics

CHECK_MODES = ("none", "bitwise", "approx")
CHECKED_OVERLAPS = ("with-sm", "sm-free", "kernel")
CHECK_ROWS = 2
APPROX_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class FullBatchComparison:
    """The supplementary comparison of whole outputs; never an acceptance gate. An error that is not finite is None."""

    equal: bool
    mismatches: int
    max_abs_error: float | None


def reason_to_skip(options, overlap):
    """Why no numerical check runs for this command line, or "" when one runs."""
    if options.check_correctness == "none":
        return "checking is off (--check-correctness none)"
    if options.large_block:
        return "numerical checks do not run for --large-block"
    if options.comp_only:
        return "numerical checks do not run for --comp-only"
    if overlap not in CHECKED_OVERLAPS and variants.parse(overlap).plain:
        return f"--overlap {overlap} is the reference itself"
    return ""


def run_checks(workload, overlap):
    """Check one mode and return its outcome for the record.

    Raises:
        AssertionError: on every rank when any rank's check fails, naming the ranks that failed.
    """
    options, runtime = workload.options, workload.runtime
    reason = reason_to_skip(options, overlap)
    if reason:
        runtime.print(f"check: skipped, {reason}")
        return {"ran": False, "reason": reason}
    rows = min(options.batch_size, CHECK_ROWS)
    outcome = {"ran": True, "mode": options.check_correctness, "rows": rows, "forward": "torch.equal"}
    problem = check_forward(workload, overlap, rows)
    agree_or_raise(runtime, problem)
    covered = "the full batch" if rows == options.batch_size else "this does not cover the full batch"
    runtime.print(f"check: forward of {overlap} equals none (torch.equal) on min(B,{CHECK_ROWS}) = {rows} rows "
                  f"per rank; {covered}")
    if options.backward:
        problem, outcome["gradients"] = check_backward(workload, overlap, rows)
        _print_gradients(runtime, outcome["gradients"])
        agree_or_raise(runtime, problem)
        runtime.print(f"check: {options.check_correctness} gradients of {overlap} pass on {rows} rows per rank")
    return outcome


def check_forward(workload, overlap, rows):
    """Compare the outputs of ``rows`` rows. Returns "" or what differs."""
    x, grad = workload.inputs.detach()[:rows], workload.options.backward
    expected = workload.run_forward("none", x, grad=grad).detach()
    actual = workload.run_forward(overlap, x, grad=grad).detach()
    if actual.shape != expected.shape:
        return f"forward {overlap}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if torch.equal(actual, expected):
        return ""
    largest, mismatches = difference(actual, expected)
    return (f"forward {overlap} differs from none: maximum absolute error {largest:.6g}, "
            f"{mismatches} of {expected.numel()} elements mismatch")


def check_backward(workload, overlap, rows):
    """Compare all gradients of ``rows`` rows. Returns ("" or what differs, diagnostics per gradient).

    Inputs and upstream gradient come from a generator of their own, seeded with seed + 7 + rank.
    """
    options, runtime = workload.options, workload.runtime
    generator = torch.Generator(runtime.device).manual_seed(options.seed + 7 + runtime.rank)
    shape = (rows, options.tokens, options.dim)
    x, upstream = workload.draw(shape, generator), workload.draw(shape, generator)
    _, expected = workload.run_gradients("none", x, upstream)
    _, actual = workload.run_gradients(overlap, x, upstream)
    return compare_gradients(expected, actual, options.check_correctness, workload.dtype)


def compare_gradients(expected, actual, mode, dtype):
    """Compare two {name: gradient}. Returns ("" or what differs, {name: diagnostics})."""
    if expected.keys() != actual.keys():
        return f"active gradients differ: only in one path {sorted(expected.keys() ^ actual.keys())}", {}
    problems, diagnostics = [], {}
    for name, reference in expected.items():
        problem, diagnostics[name] = _compare_gradient(name, reference, actual[name], mode, dtype)
        problems.append(problem)
    return "; ".join(filter(None, problems)), diagnostics


def _compare_gradient(name, expected, actual, mode, dtype):
    if expected.shape != actual.shape:
        return f"gradient of {name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}", {}
    same = torch.equal(actual, expected)
    relative = 0.0 if same else frobenius_relative_error(actual, expected)
    largest, mismatches = difference(actual, expected)
    p99, most = ulp_statistics(actual, expected)
    values = {"relative_error": relative, "max_abs_error": largest, "mismatches": mismatches,
              "p99_ulp": p99, "max_ulp": most}
    if mode == "bitwise":
        failed, limit = not same, "torch.equal"
    else:
        limit = APPROX_LIMITS[dtype]
        failed = not relative <= limit
    problem = (f"gradient of {name}: relative error {relative:.3g} (required: {limit}), maximum absolute error "
               f"{largest:.6g}, {mismatches} of {expected.numel()} elements mismatch") if failed else ""
    return problem, values


def frobenius_relative_error(actual, expected):
    """||actual - expected|| / max(||expected||, 1e-12), norms in float32."""
    error = torch.linalg.vector_norm(actual.float() - expected.float())
    return (error / torch.linalg.vector_norm(expected.float()).clamp_min(1e-12)).item()


def compare_full_batch(workload, overlap):
    """Compare the whole output of ``overlap`` with none over all ranks. Reported apart, never asserted."""
    x, grad = workload.inputs.detach(), workload.options.backward
    expected = workload.run_forward("none", x, grad=grad).detach()
    actual = workload.run_forward(overlap, x, grad=grad).detach()
    parts = workload.runtime.gather((torch.equal(actual, expected), *difference(actual, expected)[::-1]))
    largest = max(part[2] for part in parts)
    result = FullBatchComparison(all(part[0] for part in parts), sum(part[1] for part in parts),
                                 largest if math.isfinite(largest) else None)
    verdict = "equal" if result.equal else f"{result.mismatches} mismatches, max abs {largest:.6g}"
    workload.runtime.print(f"full-batch comparison (supplementary, not a gate): {overlap} against none over all "
                           f"{x.shape[0]} rows of every rank: {verdict}")
    return asdict(result)


def check_shape(workload, output):
    """Check the complete timed output's shape. Raises AssertionError on every rank."""
    expected = workload.inputs.shape
    problem = "" if output.shape == expected else f"output shape {tuple(output.shape)}, expected {tuple(expected)}"
    agree_or_raise(workload.runtime, problem)


def agree_or_raise(runtime, problem):
    """Raise AssertionError on every rank when any rank reports a problem, so that no rank waits for another."""
    problems = runtime.gather(problem)
    failed = [rank for rank, text in enumerate(problems) if text]
    if failed:
        raise AssertionError(f"check failed on rank(s) {failed}: " +
                             (problem or f"rank {failed[0]}: {problems[failed[0]]}"))


def _print_gradients(runtime, gradients):
    for name, values in gradients.items():
        if values:
            runtime.print(f"  d {name}: relative {values['relative_error']:.3g}, max abs "
                          f"{values['max_abs_error']:.3g}, ULP p99 {values['p99_ulp']} max {values['max_ulp']}")
