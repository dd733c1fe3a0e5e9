"""The faults that `scripts/faults.py` makes: what goes wrong on one rank, and what the others do meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TOKENS, DIM, K, ROWS = 12, 128, 2, 2
OTHER, OF_STORE = -1, 0  # the rank at fault: the last, or the one whose process holds the store


@dataclass(frozen=True)
class Fault:
    """What goes wrong on rank `who`: `step` names the method of `Steps` that makes it, `settings` its own variables.

    `everywhere`: variables of all ranks. `device`: where it can be made, None for anywhere.
    """

    text: str
    step: str = "calls"
    who: int = OTHER
    settings: dict = field(default_factory=dict)
    everywhere: dict = field(default_factory=dict)
    device: str | None = None
    torchrun: bool = False


DECIDED = {"A2A_FFN_RECIPE": "eager_exact", "A2A_FFN_BIAS": "add"}  # so that the first call compiles one layer only
PEERS = {"A2A_FFN_TRANSPORT": "peers", "A2A_FFN_STRICT": "1"}
FAULTS = {
    "dies-at-once": Fault("is killed before its first call", "dies_at_once"),
    "dies-in-a-call": Fault("is killed while the others call the layer again", "dies"),
    "dies-in-backward": Fault("is killed while the others run backward", "dies_in_backward"),
    "store-dies": Fault("is killed, and with it the store of the group", "dies", OF_STORE),
    "stalls": Fault("sleeps while the others call the layer again", "stalls"),
    "is-stopped": Fault("is stopped (SIGSTOP) while the others call the layer again", "is_stopped"),
    "store-is-stopped": Fault("is stopped, and with it the store of the group", "is_stopped", OF_STORE),
    "raises": Fault("raises in its plugin's second call", "raises"),
    "raises-torchrun": Fault("raises in its plugin's second call, under torchrun", "raises", torchrun=True),
    "bad-input": Fault("has an input of another width", "bad_input"),
    "other-version": Fault("has another version of this package", "other_version"),
    "other-plan": Fault("has other chunks", settings={"A2A_FFN_CHUNKS": "1"}),
    "other-dtype": Fault("has weights and inputs of another dtype", "other_dtype"),
    "other-shape": Fault("has another batch size in the first call", "other_shape"),
    "other-shape-later": Fault("has another batch size, new to it, in the second call", "other_shape_later"),
    "other-shape-known": Fault("has another batch size, known to all, in a later call", "other_shape_known"),
    "compiler-fails": Fault("cannot compile", "compiler_fails"),
    "peers-stalls": Fault("sleeps while the others use its memory", "stalls", everywhere=PEERS, device="cuda"),
    "peers-dies": Fault("is killed while the others use its memory", "dies", everywhere=PEERS, device="cuda"),
}
HEALTHY = Fault("nothing goes wrong")
AGAIN = Fault("nothing goes wrong", "exchanges")
RUNS = {**FAULTS, "healthy": HEALTHY, "again": AGAIN}


class Steps:
    """A rank of a run: a healthy first call unless the fault comes before it, then what the fault says."""

    def __init__(self, runtime, folder: Path, faulty: bool, dtype):
        import torch
        from rankmixer.ffn import PerTokenFFN

        torch.manual_seed(runtime.rank)
        self.torch, self.runtime, self.folder, self.faulty = torch, runtime, folder, faulty
        self.dtype = dtype
        self.ffn = PerTokenFFN(TOKENS, DIM, K, dtype=dtype, device=runtime.device)

    def call(self, rows: int = ROWS, width: int = DIM, dtype=None):
        inputs = self.torch.randn(rows, TOKENS, width, device=self.runtime.device, dtype=dtype or self.dtype)
        output = self.ffn._plugin_forward(self.ffn, inputs.requires_grad_())
        self.runtime.synchronize()
        return output

    def made(self) -> None:
        """The moment from which seconds are counted."""
        (self.folder / "fault").touch()

    def calls(self) -> None:
        if self.faulty:
            self.made()
        self.call()
        self.call().sum().backward()

    def exchanges(self) -> None:
        """The reference's exchanges alone, for which nothing is compiled."""
        self.ffn(self.torch.randn(ROWS, TOKENS, DIM, device=self.runtime.device, dtype=self.dtype))
        self.runtime.barrier()

    def dies_at_once(self) -> None:
        if self.faulty:
            self.made()
            os.kill(os.getpid(), signal.SIGKILL)
        self.call()

    def _second(self, fault) -> None:
        """A healthy call, forward and backward; then the fault on one rank and two more calls on the others."""
        self.call().sum().backward()
        if self.faulty:
            time.sleep(0.5)
            self.made()
            fault()
        self.call()
        self.call().sum().backward()

    def dies(self) -> None:
        self._second(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def dies_in_backward(self) -> None:
        self.call().sum().backward()
        output = self.call()
        if self.faulty:
            time.sleep(0.5)
            self.made()
            os.kill(os.getpid(), signal.SIGKILL)
        output.sum().backward()
        self.runtime.synchronize()

    def stalls(self) -> None:
        self._second(lambda: time.sleep(1e6))

    def is_stopped(self) -> None:
        self._second(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def raises(self) -> None:
        def fault():
            from compile_overlap import calls

            def broken(*_):
                raise RuntimeError("no memory of this call")

            calls.known_layer = broken

        self._second(fault)

    def bad_input(self) -> None:
        self._second(lambda: self.call(width=DIM + 1))

    def other_version(self) -> None:
        if self.faulty:
            from compile_overlap import faults

            usual = faults.versions()
            faults.versions = lambda: {**usual, "compile_overlap": "0123456789ab"}
        self.calls()

    def other_dtype(self) -> None:
        if self.faulty:
            self.ffn.to(self.torch.float16)
            self.dtype = self.torch.float16
        self.calls()

    def other_shape(self) -> None:
        if self.faulty:
            self.made()
        self.call(ROWS + self.faulty)

    def other_shape_later(self) -> None:
        self._second(lambda: self.call(ROWS + 1))

    def other_shape_known(self) -> None:
        self.call(ROWS + 1)
        self._second(lambda: self.call(ROWS + 1))

    def compiler_fails(self) -> None:
        if self.faulty:
            from compile_overlap import compiler

            def broken(*_, **__):
                raise RuntimeError("no compiler here")

            compiler.compile_fx = broken
        self.calls()


def run_rank(fault: Fault, device: str, folder: Path) -> int:
    """Run the rank that the environment names, and leave its last words in FOLDER/RANK.txt."""
    rank = os.environ["RANK"]
    try:
        _run(fault, device, folder)
    except Exception as error:
        (folder / f"{rank}.txt").write_text(" ".join(f"{type(error).__name__}: {error}".split())[:900])
        raise
    (folder / f"{rank}.txt").write_text("ended without an error")
    sys.stdout.flush()
    os._exit(0)  # on torch 2.6.0 gloo can hang when it is destroyed


def _run(fault: Fault, device: str, folder: Path) -> None:
    import torch
    from compile_overlap import watched
    from rankmixer.runtime import choose_device, start_runtime

    torch.set_num_threads(1)
    runtime = start_runtime(choose_device(device))
    faulty = runtime.rank == fault.who % runtime.world_size and fault not in (HEALTHY, AGAIN)
    each = Steps(runtime, folder, faulty, torch.bfloat16 if device == "cuda" else torch.float32)
    each.ffn.load_plugin()
    with watched():
        getattr(each, fault.step)()
