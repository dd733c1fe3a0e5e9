"""A fault of one rank ends in an error on every other one that names it, within the group's timeout and a grace."""

import ctypes
import datetime
import functools
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from uncompiled import Uncompiled

import compile_overlap
from compile_overlap import api, board, compiler, faults
from compile_overlap.layout import Layout

tune_module = importlib.import_module("compile_overlap.tune")

ROOT = Path(__file__).resolve().parents[2]
RANKS, TIMEOUT_S, LIMIT_S = 3, 3, 100
OTHER = 1  # the rank at fault, unless a test says otherwise
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "torch._inductor.compile_fx"])


def _on_ranks(job, folder, ending=range(RANKS), port=0):
    """What `job(rank)` returns on the ranks that are to end; the others are killed afterwards."""
    processes = [_FORKS.Process(target=_rank, args=(job, rank, folder, tuple(ending), port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for rank in ending:
        processes[rank].join(LIMIT_S)
    hung = [rank for rank in ending if processes[rank].exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    assert not hung
    assert all(processes[rank].exitcode == 0 for rank in ending)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in ending]


def _rank(job, rank, folder, ending, port):
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT_S)
    connect = functools.partial(dist.TCPStore, "127.0.0.1", world_size=RANKS, timeout=limit)
    if rank == 0:
        store = connect(port=port, is_master=True, wait_for_workers=False)
        _write(folder / "port", str(store.port))
    else:
        store = connect(port=int(_read(folder / "port")), is_master=False)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    torch.save(job(rank), folder / f"{rank}.pt")
    _write(folder / f"done-{rank}", "")
    for other in ending if rank == 0 else ():  # the store is this process's
        _read(folder / f"done-{other}")
    sys.stdout.flush()
    os._exit(0)


def _write(path, text):
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _read(path):
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def _error(call):
    """What a call raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _agree(rows=2, dtype=torch.float32):
    api.agree_on_call(None, Layout(RANKS, rows, 6, 8, 16), dtype, None)


def _ffn(rank):
    """A layer that the reference answers, so that nothing is compiled."""
    from archive_double import ArchiveFFN

    torch.manual_seed(rank)
    ffn = ArchiveFFN(6, 8, 2, group=dist.group.WORLD, size=RANKS, index=rank)
    ffn.gemm_backend = "none of ours"
    return ffn


def _together(rank):
    """Faults after which the group is as it was."""
    os.environ["A2A_FFN_KERNEL_PLUGIN"] = "compile_overlap"
    faulty, found = rank == OTHER, {}
    found["shape"] = _error(lambda: _agree(2 + faulty))
    found["dtype"] = _error(lambda: _agree(dtype=torch.float16 if faulty else torch.float32))
    os.environ["A2A_FFN_CHUNKS"] = "2" if faulty else "4"
    found["plan"] = _error(_agree)
    os.environ["A2A_FFN_CHUNKS"] = "4"
    usual = faults.versions()
    faults.versions = lambda: {**usual, "torch": "1.0"} if faulty else usual
    found["version"] = _error(_agree)
    faults.versions = lambda: usual
    found["all alike"] = _error(_agree)
    place = faults._board(None).place
    _agree()
    found["nothing is asked again"] = faults._board(None).place == place
    ffn, inputs = _ffn(rank), torch.randn(2, 6, 8)
    wide = torch.randn(2, 6, 9)
    found["raises"] = _error(lambda: ffn(wide if faulty else inputs, overlap="kernel"))
    with torch.no_grad():
        found["and goes on"] = torch.equal(ffn(inputs, overlap="kernel"), ffn(inputs))
    found["all raise"] = _error(lambda: ffn(wide, overlap="kernel"))
    with torch.no_grad():
        found["and go on"] = torch.equal(ffn(torch.cat((inputs, inputs)), overlap="kernel")[:2], ffn(inputs))
    return found


def test_ranks_that_differ_and_ranks_that_raise_are_named(tmp_path):
    results = _on_ranks(_together, tmp_path)
    for rank, found in enumerate(results):
        for name, what, own, others in (
            ("shape", "inputs.shape", "(3, 6, 8)", "(2, 6, 8)"),
            ("dtype", "dtype", "torch.float16", "torch.float32"),
            ("plan", "A2A_FFN_CHUNKS", "2", "4"),
            ("version", "torch", "1.0", torch.__version__),
        ):
            text = found[name]
            values = f"{what} is {others} on ranks 0, 2, {own} on rank 1"
            expected = f"must be the same on every rank of the group, but {values}"
            assert text.startswith("ValueError: ") and text.endswith(expected), text
        assert found["all alike"] == ""
        assert found["nothing is asked again"] and found["and goes on"] and found["and go on"]
        text, wide = found["raises"], "ValueError: inputs.shape[2] (D) = 9: must be the D of ffn.w1, 8"
        if rank == OTHER:
            assert text == wide
        else:
            call = "forward_ffn(inputs (2, 6, 9), torch.float32)"
            assert text.startswith(f"RankFault: rank 1 failed in {call}: {wide}"), text
        assert found["all raise"] == wide


def _handled(rank):
    """Errors of one rank that it handles, as a training loop may; the others go on, or raise in the same call."""
    os.environ["A2A_FFN_KERNEL_PLUGIN"] = "compile_overlap"
    faulty, found, ffn = rank == OTHER, {}, _ffn(rank)

    def call(rows, width=8):
        with torch.no_grad():
            return _error(lambda: ffn(torch.randn(rows, 6, width), overlap="kernel"))

    def step(*rows):
        with faults.watched():
            list(map(call, rows))
            if faulty:
                raise OSError("no such file")

    found["in a step"] = _error(lambda: step(2))
    time.sleep(0.5 if faulty else 0)
    found["and another batch size"] = call(3)
    found["tried again"] = [call(3, width=9), call(3)] if faulty else [call(3)]
    found["and another one"] = call(4)
    found["twice"] = [call(5, width=9 if faulty else 8), call(6, width=9 if faulty else 8)]
    found["and one more"] = call(7)
    found["explained"] = _error(lambda: compile_overlap.explain(ffn, torch.randn(8, 6, 9 if faulty else 8)))
    dist.barrier()  # a rank that fails again at once overwrites its word
    os.environ["A2A_FFN_COSTS"] = "nonsense" if faulty else ""
    found["tuned"] = _error(lambda: compile_overlap.tune(ffn, torch.randn(8, 6, 8)))
    os.environ["A2A_FFN_COSTS"] = ""
    found["at last"] = call(9)
    board.GRACE_S = 1
    found["stays away"] = _error(step) if faulty else ""
    time.sleep(2 if faulty else 0)
    found["too late"] = call(10)
    found["and together"] = call(11)
    return found


def test_an_error_that_was_handled_is_no_fault_of_the_group(tmp_path):
    for rank, found in enumerate(_on_ranks(_handled, tmp_path)):
        for name in ("and another batch size", "and another one", "and one more", "at last", "and together"):
            assert found[name] == "", (rank, name, found)
        assert found["tried again"][-1] == ""
        if rank == OTHER:
            assert found["in a step"] == found["stays away"] == "OSError: no such file"
            assert "ranks 0, 2 did not come to agree" in found["too late"], found
            continue
        assert found["in a step"] == ""
        for text, call, error in (
            *((text, "forward_ffn(inputs (", "inputs.shape[2] (D) = 9") for text in found["twice"]),
            (found["explained"], "explain(inputs (8, 6, 9), torch.float32)", "inputs.shape[2] (D) = 9"),
            (found["tuned"], "tune(inputs (8, 6, 8), torch.float32)", "A2A_FFN_COSTS = nonsense"),
            (found["too late"], "a step", "OSError: no such file"),
        ):
            assert text.startswith(f"RankFault: rank 1 failed in {call}") and error in text, text


def _leave():
    """Leave the group; its object is kept, as in the benchmark's `stop_runtime`: freeing it can hang (torch 2.6.0)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()


def _remade(folder, rank):
    """The group is made again by another store, after an error of which one rank alone had something to tell."""

    def step():
        with faults.watched():
            if rank == OTHER:
                _raises()

    _error(step)
    _leave()
    store = dist.FileStore(str(folder / "again"), RANKS)
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    return _error(_agree)


def test_a_group_that_is_made_again_agrees(tmp_path):
    assert _on_ranks(functools.partial(_remade, tmp_path), tmp_path) == [""] * RANKS


def _overlapped(rank, group=None, size=RANKS):
    ffn = _ffn(rank)
    ffn.gemm_backend = "bmm"
    if size == 1:
        ffn = type(ffn)(6, 8, 2)
    ffn.ep_group = group
    return ffn


def _layers(rank):
    """Layers that are overlapped: of two groups in two threads, of one rank, and one that ranks call unlike."""
    os.environ.update(A2A_FFN_KERNEL_PLUGIN="compile_overlap", A2A_FFN_RECIPE="eager_exact", A2A_FFN_BIAS="add")
    compiler.CompiledLayer, found = Uncompiled, {}
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S)) for _ in range(2)]
    ffns, inputs = [_overlapped(rank, group) for group in groups], torch.randn(2, 6, 8)
    usual, barrier = api._decided, threading.Barrier(2)

    def in_another_order(ffn, *arguments):
        barrier.wait()
        time.sleep(0.3 if ffn is ffns[rank % 2] else 0.0)
        return usual(ffn, *arguments)

    api._decided = in_another_order
    with ThreadPoolExecutor(2) as threads, torch.no_grad():
        found["two threads"] = list(threads.map(lambda ffn: _error(lambda: ffn(inputs, overlap="kernel")), ffns))
    api._decided = usual
    if rank == 0:
        alone = _overlapped(rank, size=1)
        found["alone"] = _error(lambda: alone(inputs, overlap="kernel"))
        found["nothing to tune"] = _error(lambda: compile_overlap.tune(alone, inputs))
    ffn = _overlapped(rank)
    with torch.no_grad():
        os.environ["A2A_FFN_PLANS"] = __file__
        measure, tune_module.measure = tune_module.measure, None
        found["no folder"] = _error(lambda: compile_overlap.tune(ffn, inputs, rounds=1))
        tune_module.measure = measure
        os.environ["A2A_FFN_PLANS"] = "off"
        if rank == OTHER:
            tune_module.Stopwatch = _no_memory
        found["no memory"] = _error(lambda: compile_overlap.tune(ffn, inputs, rounds=1))
        found["known"] = _error(lambda: ffn(inputs, overlap="kernel"))
    found["with gradients"] = _error(lambda: ffn(inputs, overlap="kernel"))
    found["unlike"] = _error(lambda: ffn(inputs.requires_grad_(rank == OTHER), overlap="kernel"))
    return found


def _no_memory(*_):
    raise torch.OutOfMemoryError("no memory left")


def test_layers_of_other_groups_and_of_one_rank_ask_nobody_else(tmp_path):
    results = _on_ranks(_layers, tmp_path)
    for found in results:
        assert found["no folder"] == f"ValueError: A2A_FFN_PLANS = {__file__}: must be a folder, or off"
        assert found["two threads"] == ["", ""] and found["known"] == found["with gradients"] == ""
    assert results[0]["alone"] == ""
    assert results[0]["nothing to tune"].startswith("ValueError: ffn.ep_group_size = 1: must be at least 2")
    told = "tune(inputs (2, 6, 8), torch.float32; no gradients): RuntimeError: nothing can be timed: no memory left"
    for rank, found in enumerate(results):
        if rank == OTHER:
            assert found["no memory"] == "RuntimeError: nothing can be timed: no memory left"
        else:
            assert found["no memory"].startswith(f"RankFault: rank 1 failed in {told}"), found
        call = "forward_ffn(inputs (2, 6, 8), torch.float32"
        unlike = f"ranks made different calls: {call}) on ranks 0, 2, {call}; inputs require gradients) on rank 1"
        assert found["unlike"].startswith(f"RankFault: {unlike}"), found


def _late(rank):
    """One rank never comes to agree."""
    if rank == OTHER:
        return None
    return _error(lambda: _ffn(rank)(torch.randn(2, 6, 8), overlap="kernel"))


def test_a_rank_that_does_not_come_is_named(tmp_path):
    results = _on_ranks(_late, tmp_path)
    for text in (results[0], results[2]):
        named = r"RankFault: rank 1 died or stalled: no word within 3 s.* rank 1 did not come to agree on forward_ffn"
        assert re.match(named, text), text


def _exchange():
    received = torch.empty(RANKS, 2)
    dist.all_to_all_single(received, torch.ones(RANKS, 2))


def _watched(fault, at_fault, rank):
    """A step in which one rank, after a good exchange, does what `fault` says, where the others exchange again."""
    _exchange()

    def step():
        with faults.watched():
            if rank == at_fault:
                fault()
            _exchange()

    return _error(step)


def _raises():
    raise KeyError("no such batch")


def _raises_and_leaves(rank):
    found = _watched(_raises, OTHER, rank)
    _leave() if rank == OTHER else None
    return found


def test_a_rank_that_raises_in_a_step_is_named_with_its_reason(tmp_path):
    results = _on_ranks(_raises_and_leaves, tmp_path)
    assert results[OTHER] == "KeyError: 'no such batch'"
    for text in (results[0], results[2]):
        assert text.startswith("RankFault: rank 1 failed in a step: KeyError: 'no such batch'. Rank "), text


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _healthy(rank):
    _exchange()
    return True


@pytest.mark.parametrize("fault, at_fault", [(_kill, OTHER), (_stop, OTHER), (_stop, 0)])
def test_a_rank_that_dies_or_stalls_is_named(fault, at_fault, tmp_path):
    """Rank 0's process holds the store: where it stalls, nobody can be asked, and nobody waits for it."""
    ending = [rank for rank in range(RANKS) if rank != at_fault]
    results = _on_ranks(functools.partial(_watched, fault, at_fault), tmp_path, ending)
    for text in results:
        named = "rank 1 died or stalled" if at_fault else "the group's store is lost, whose process (rank 0"
        assert text.startswith("RankFault: ") and named in text and "gloo" in text, text
    again = tmp_path / "again"
    again.mkdir()
    assert _on_ranks(_healthy, again, port=int(_read(tmp_path / "port"))) == [True] * RANKS
