"""Variants of a mode: further points of a comparison, written ``mode:variant``.

    variant                  of             what it is
    ``naive``                kernel         the chunked layer without our schedule: torch.compile's own order
    ``sequential``           kernel         the same layer as one chunk through collectives, so that nothing can overlap
    ``chunks=4``             kernel         that many chunks along L; ``chunks=8+16+8`` are their sizes
    ``peers``                kernel         through the peers' memory; ``peers=4+28`` with these chunks
    ``NAME=VALUE``           kernel         the plugin's setting ``A2A_FFN_NAME``; several joined by +, / for a comma of
                                            a list: ``kernel:TRANSPORT=peers+CHUNKS=8/24``
    ``inductor-reorder``     none, kernel   Inductor's reordering of collectives, with the version's strongest passes
    ``inductor-overlap``     none, kernel   Inductor's overlap scheduling of the FX graph, with measured collectives
    ``inductor-overlap-nodeps``             the same without the dependencies that keep its order (none, kernel)

The ``inductor-*`` variants of kernel are given the chunked layer, with our schedule off as in ``naive``; those of none
the sequential one. They need compilation. What a variant changes is environment variables around each of its calls
(the plugin reads them when it is called, or when it is traced) and Inductor's configuration for its compilations.

A kernel variant is strict (``A2A_FFN_STRICT=1``): where the plugin would let the reference answer, it fails.
"""

import contextlib
import functools
import os
import re
from dataclasses import dataclass, field

SEPARATOR = ":"
CHUNKS, PEERS = "chunks=", "peers="
VARIANTS = ("naive", "sequential", CHUNKS + "N", "peers", PEERS + "N", "NAME=VALUE", "inductor-reorder",
            "inductor-overlap", "inductor-overlap-nodeps")
_LISTS = ("CHUNKS", "COSTS", "DISABLE_PASSES")  # settings whose values hold commas
_SETTINGS = re.compile(r"[A-Z_]+=[^+=]*(\+[A-Z_]+=[^+=]*)*")
_NAIVE = {"A2A_FFN_DISABLE_PASSES": "inplace-gradients,pin-order,reorder,reserve-sms,share-kernels",
          "A2A_FFN_RESERVED_SMS": "0"}
_REORDER_PASSES = ("reorder_communication_preserving_peak_memory", "sink_waits_iterative",
                   "reorder_communication_preserving_peak_memory")
_MEMORY_CAPS = {"max_memory_increase_gb": 1024.0, "max_memory_increase_ratio": 64.0, "max_in_flight_gb": 1024.0}


@dataclass(frozen=True)
class Variant:
    """A mode and what a variant of it changes; a mode by itself changes nothing.

    Attributes:
        name: ``mode`` or ``mode:variant``, as on the command line and in the record.
        environment: environment variables around each call.
        inductor_config: Inductor settings for the compilation of forward and backward.
    """

    name: str
    mode: str
    environment: dict = field(default_factory=dict)
    inductor_config: dict = field(default_factory=dict)

    @property
    def plain(self):
        return self.name == self.mode

    @contextlib.contextmanager
    def applied(self):
        """The variant's environment, meanwhile. Around a measurement it keeps what `around` does out of the time."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def around(self, function):
        """``function`` with the variant's environment during each call."""
        if not self.environment:
            return function

        @functools.wraps(function)
        def call(*arguments):
            if all(os.environ.get(name) == value for name, value in self.environment.items()):
                return function(*arguments)
            with self.applied():
                return function(*arguments)

        return call

    def describe(self):
        """What is changed, for the record."""
        return {"environment": dict(self.environment), "inductor_config": dict(self.inductor_config)}

    def same_as(self, other):
        """Whether the two are one thing under two names, such as ``kernel:chunks=4`` and ``kernel:CHUNKS=4``."""
        return (self.mode, self.describe()) == (other.mode, other.describe())


@functools.lru_cache(maxsize=None)
def parse(name):
    """The `Variant` of a ``mode`` or ``mode:variant``; the mode itself is not looked at.

    Raises:
        ValueError: an unknown variant, one that the mode does not have, or one that this torch cannot run.
    """
    mode, separator, variant = name.partition(SEPARATOR)
    if not separator:
        return Variant(name, mode)
    inductor = variant in VARIANTS and variant.startswith("inductor-")
    ours = variant in ("naive", "sequential", "peers") or variant.startswith((CHUNKS, PEERS))
    if not inductor and not ours and not _SETTINGS.fullmatch(variant):
        raise ValueError(f"modes: {name!r}: {variant!r} is not a variant; allowed are {', '.join(VARIANTS)}")
    if mode != "kernel" and not (inductor and mode == "none"):
        raise ValueError(f"modes: {name!r}: {variant} is a variant of {'none and kernel' if inductor else 'kernel'}")
    if not inductor:
        return Variant(name, mode, {**_layer_settings(name, variant), "A2A_FFN_STRICT": "1"})
    settings = _reordering() if variant == "inductor-reorder" else _overlap_scheduling(name, variant)
    return Variant(name, mode, {**_NAIVE, "A2A_FFN_STRICT": "1"} if mode == "kernel" else {}, settings)


def require_compilation(name, no_compile):
    """Raise ValueError for a variant that changes Inductor's configuration in a run that compiles nothing."""
    if no_compile and parse(name).inductor_config:
        raise ValueError(f"modes: {name!r}: changes Inductor's configuration, so it does not go with --no-compile")


def _layer_settings(name, variant):
    if variant == "naive":
        return _NAIVE
    if variant == "sequential":
        return {"A2A_FFN_CHUNKS": "1", "A2A_FFN_TRANSPORT": "collectives"}
    if _SETTINGS.fullmatch(variant):
        pairs = [setting.split("=") for setting in variant.split("+")]
        names = [setting for setting, _ in pairs]
        if len(set(names)) < len(names) or {"KERNEL_PLUGIN", "STRICT"} & set(names):
            raise ValueError(f"modes: {name!r}: must be distinct settings other than KERNEL_PLUGIN and STRICT")
        return {f"A2A_FFN_{setting}": value.replace("/", ",") if setting in _LISTS else value
                for setting, value in pairs}
    transport = {"A2A_FFN_TRANSPORT": "peers"} if variant.startswith("peers") else {}
    if variant == "peers":
        return transport
    sizes = variant.removeprefix(CHUNKS).removeprefix(PEERS).split("+")
    if not all(re.fullmatch("[1-9][0-9]*", size) for size in sizes):
        raise ValueError(f"modes: {name!r}: must be a positive count, or positive sizes joined by +")
    return {"A2A_FFN_CHUNKS": ",".join(sizes), **transport}


def _reordering():
    """The list that newer versions recommend where they know all of it, else the version's own."""
    from torch._inductor import comms, config

    known = all(hasattr(comms, each) for each in _REORDER_PASSES)
    passes = list(_REORDER_PASSES) if known else list(config.reorder_for_compute_comm_overlap_passes)
    return {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": passes}


def _overlap_scheduling(name, variant):
    import torch
    from torch._inductor import config

    known = getattr(config, "aten_distributed_optimizations", None)
    needed = ("enable_overlap_scheduling", "collective_estimator", "insert_overlap_deps")
    if not all(hasattr(known, option) for option in needed):
        raise ValueError(f"modes: {name!r}: torch {torch.__version__} has no overlap scheduling "
                         f"(torch._inductor.config.aten_distributed_optimizations)")
    settings = {"enable_overlap_scheduling": True, "collective_estimator": "benchmark",
                "insert_overlap_deps": variant == "inductor-overlap",
                **{option: cap for option, cap in _MEMORY_CAPS.items() if hasattr(known, option)}}
    return {f"aten_distributed_optimizations.{option}": value for option, value in settings.items()}


def prime(workload, name, calls):
    """Run the unmeasured first ``calls`` of a variant, which compile it, on every rank of the group.

    Returns:
        "" or why it failed, the same on every rank: the first line of the first failing rank's error. The ranks fail
        alike, since they compile the same graphs; one that failed alone would leave the others in an exchange.
    """
    problem = ""
    try:
        for call in calls:
            call()
    except Exception as error:  # whatever a compiler or generated code raises is what is reported
        problem = first_line(error)
    workload.clear_gradients()
    problems = workload.runtime.gather(problem)
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if not failed:
        return ""
    workload.runtime.print(f"{name} failed on rank(s) {sorted(failed)}: {next(iter(failed.values()))}")
    return next(iter(failed.values()))


def first_line(error):
    """The type and first line of an error; of the compiler's own, where Dynamo wraps it."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
