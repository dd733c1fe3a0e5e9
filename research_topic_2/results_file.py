"""A results file: comparisons of one stack on one machine, one JSON line each, appended as they are measured.

Lines with the same pass and compilation (`comparison_of`) form one comparison and have the same configuration but for
the shape; all lines have the same versions, device, commit, ranks, plugin and environment variables. `append` refuses
anything else, and a shape that a comparison has, so that none can mix settings or count a shape twice. A line is on
disk when `append` returns. What a killed process left of an unfinished line is no record: `read` leaves it out and
`append` removes it. One sweep at a time writes a file (`only_sweep`); `append` by itself is safe among several processes.
"""

import contextlib
import fcntl
import json
import math
import os
from pathlib import Path

import numpy as np

from rankmixer import schema

SHAPE = ("batch_size", "tokens", "dim", "k")
BOOTSTRAP_SAMPLES = 2000
_VARIABLES = ("A2A_FFN_", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_", "NCCL_", "OMP_NUM_THREADS", "TORCHINDUCTOR_",
              "TORCH_NCCL_")
_NO_SETTING = (*SHAPE, "shapes", "output", "draw", "json", "device", "help")  # the device's name is in the environment
_NO_VARIABLE = ("A2A_FFN_KERNEL_PLUGIN", "TORCHINDUCTOR_CACHE_DIR")  # a path, and named by `plugin`; a path
_OF_ALL_LINES = ("world_size", "plugin")


def variables():
    """{name: value} of the environment variables that decide what exchanges and compilation do."""
    return {name: value for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and name not in _NO_VARIABLE}


def shape_of(record):
    """(B, T, D, k) of a record."""
    return tuple(record["configuration"][name]["value"] for name in SHAPE)


def comparison_of(record):
    """What makes lines one comparison: (pass, "compiled" or "eager")."""
    return record["pass"], "eager" if record["configuration"]["no_compile"]["value"] else "compiled"


def differences(line, record):
    """What keeps two records from standing in one file, as ``name=value there, value now``; [] if nothing."""
    found = [_difference(name, line[name], record[name]) for name in _OF_ALL_LINES]
    for part in ("environment", "variables"):
        found += _of_dict(f"{part}.", line[part], record[part])
    if comparison_of(line) == comparison_of(record):
        ours, theirs = ({name: setting["value"] for name, setting in each["configuration"].items()
                         if name not in _NO_SETTING} for each in (line, record))
        found += _of_dict("", ours, theirs)
    return [text for text in found if text]


def require_same(path, lines, record):
    """Raise ValueError, saying what differs, unless ``record`` may stand beside the ``lines`` of the file ``path``."""
    for number, line in enumerate(lines, 1):
        found = differences(line, record)
        if found:
            raise ValueError(f"output={str(path)!r}: line {number} is of another configuration: {'; '.join(found)}")


def whole_lines(path):
    """The lines of a file but for what a killed process left of an unfinished one."""
    return Path(path).read_bytes().split(b"\n")[:-1]


def read(path):
    """The records of a results file, [] where there is none. Raises ValueError for a whole line that is no record."""
    found = []
    for number, line in enumerate(whole_lines(path) if Path(path).exists() else (), 1):
        try:
            found.append(_comparison(schema.parsed(line)))
        except ValueError as error:
            problem = schema.shortened(error)
            raise ValueError(f"output={str(path)!r}: line {number} is no record of a sweep: {problem}") from None
    return found


def _comparison(line):
    """The line's record. Raises ValueError for another."""
    record = schema.validate(line)
    kind, own = record["kind"], record.get("variables")
    if kind != "comparison" or not isinstance(own, dict):
        raise ValueError(f"kind={kind!r}, variables={own!r}: must be a comparison with its variables")
    settings = record["configuration"]
    missing = [name for name in (*SHAPE, "no_compile") if name not in settings]
    if missing:
        raise ValueError(f"configuration={settings!r}: must hold {', '.join(missing)} too")
    return record


@contextlib.contextmanager
def only_sweep(path):
    """Keep other sweeps from the file ``path``, meanwhile. Raises ValueError where one is running."""
    with open(f"{path}.lock", "w") as lock:  # stays: were it removed, two sweeps could each hold a file of that name
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"output={str(path)!r}: another sweep is writing it") from None
        yield


def append(path, record):
    """Append one record as a line and wait until it is on disk. Raises ValueError where it does not belong there."""
    text = json.dumps(_comparison(record), allow_nan=False, separators=(",", ":")) + "\n"
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = read(path)
        require_same(path, lines, record)
        known = {(comparison_of(line), shape_of(line)) for line in lines}
        if (comparison_of(record), shape_of(record)) in known:
            raise ValueError(f"output={str(path)!r}: {comparison_of(record)} has the shape {shape_of(record)} already")
        file.seek(0)
        finished = file.read().rfind(b"\n") + 1
        file.truncate(finished)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def ratio_interval(baseline, candidate, seed=0):
    """median(baseline) / median(candidate) and its 95 % bootstrap interval, of two lists of seconds."""
    generator = np.random.default_rng(seed)

    def medians(samples):
        return np.median(generator.choice(np.asarray(samples), (BOOTSTRAP_SAMPLES, len(samples))), axis=1)

    low, high = np.percentile(medians(baseline) / medians(candidate), (2.5, 97.5))
    return float(np.median(baseline) / np.median(candidate)), float(low), float(high)


def summarize(records):
    """{mode: {"shapes": [{"shape", "ratio", "low", "high", "equal"}], "geometric_mean", "worst"}} of one comparison."""
    modes = dict.fromkeys(name for each in records for name in each["summary"] if name != "none")
    result = {}
    for mode in modes:
        rows = []
        for each in (each for each in records if mode in each["summary"]):
            slowest = {name: [max(column) for column in zip(*each["measurements"][name]["samples_s"])]
                       for name in ("none", mode)}
            ratio, low, high = ratio_interval(slowest["none"], slowest[mode])
            equal = each["full_batch"].get(mode, {}).get("equal")
            rows.append({"shape": list(shape_of(each)), "ratio": ratio, "low": low, "high": high, "equal": equal})
        logarithms = [math.log(row["ratio"]) for row in rows]
        result[mode] = {"shapes": rows, "geometric_mean": math.exp(sum(logarithms) / len(rows)),
                        "worst": min(row["ratio"] for row in rows)}
    return result


def _of_dict(prefix, ours, theirs):
    names = dict.fromkeys((*ours, *theirs))
    return [_difference(prefix + name, ours.get(name), theirs.get(name)) for name in names]


def _difference(name, ours, theirs):
    return "" if ours == theirs else f"{name}={ours!r} there, {theirs!r} now"
