"""Process setup from torchrun's environment, and the few group operations that the tools share."""

import ctypes
import datetime
import logging
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist


TIMEOUT_VARIABLE, SHARE_VARIABLE = "A2A_TIMEOUT_S", "A2A_SHARE_GPUS"
_SHARING_NCCL = (2, 30)  # from this version on ranks may share a GPU


@dataclass(frozen=True)
class Runtime:
    """This process: its rank, the world size and the device. ``group`` is None when run without torchrun."""

    rank: int
    world_size: int
    device: torch.device
    group: object

    @property
    def is_main(self):
        return self.rank == 0

    def print(self, *values):
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)

    def gather(self, value):
        """Every rank's ``value`` (any picklable object), in rank order, on every rank."""
        if self.group is None:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self):
        if self.group is not None:
            dist.barrier(group=self.group)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def environment_rank():
    """(RANK, WORLD_SIZE, LOCAL_RANK) that torchrun sets; (0, 1, 0) without torchrun."""
    return tuple(int(os.environ.get(name, default)) for name, default in
                 (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def choose_device(name):
    """Return this rank's device. ``name`` is "cuda", "cpu" or None (cuda where there is one).

    Raises:
        ValueError: no CUDA device, more local ranks than GPUs, or of `shares_gpus`.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name is None and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError(f"device={name!r}: no CUDA device is available here, only 'cpu' is allowed")
    local_rank = environment_rank()[2]
    if local_rank >= available and not shares_gpus():
        raise ValueError(f"LOCAL_RANK={local_rank}: this host has {available} GPU(s); at most one rank per GPU is "
                         f"allowed, or any number with {SHARE_VARIABLE}=1, for checks alone")
    return torch.device("cuda", local_rank % available)


def shares_gpus():
    """Whether ranks may share GPUs (``A2A_SHARE_GPUS=1``): what is checked counts then, what is timed does not.

    Raises:
        ValueError: the variable is neither 0 nor 1, or the NCCL that is loaded refuses ranks that share a GPU.
    """
    text = os.environ.get(SHARE_VARIABLE) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{SHARE_VARIABLE}={text!r}: allowed are 0 and 1")
    found = nccl_version() if text == "1" else _SHARING_NCCL
    if found < _SHARING_NCCL:
        raise ValueError(f"{SHARE_VARIABLE}=1: NCCL {'.'.join(map(str, found))} lets no ranks share a GPU, 2.30 and newer "
                         f"do; LD_PRELOAD=/path/libnccl.so.2 puts one in its place")
    return text == "1"


def nccl_version():
    """The version of the NCCL that is loaded, (major, minor, patch); `torch.cuda.nccl.version` is what torch was built with."""
    code = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):  # NCCL is a part of torch's own library
        failed = True
    return torch.cuda.nccl.version()[:3] if failed else (code.value // 10000, code.value // 100 % 100, code.value % 100)


def group_timeout():
    """How long ranks wait for each other: ``A2A_TIMEOUT_S`` in seconds, or None, torch's own (gloo 30 min, NCCL 10).

    Raises:
        ValueError: the variable is not a number of seconds, at least 1 and at most a day.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r}: must be a number of seconds, from 1 to 86400")
    return datetime.timedelta(seconds=seconds)


def start_runtime(device):
    """Select the device and, under torchrun, initialise the process group (NCCL on CUDA, gloo on CPU).

    Raises:
        ValueError: of `group_timeout` and `shares_gpus`.
    """
    timeout = group_timeout()
    rank, world_size, _ = environment_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Runtime(rank, world_size, device, None)
    if device.type == "cuda":
        if shares_gpus():
            for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
                os.environ.setdefault(name, "1")
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return Runtime(rank, world_size, device, dist.group.WORLD)


def stop_runtime():
    """Leave the process group, if one was initialised here.

    The group's object is never freed: gloo's destructor joins its worker thread while it holds the interpreter's lock,
    which that thread may be waiting for to free a tensor (seen on torch 2.6.0, in one of some ten runs).
    """
    if dist.is_available() and dist.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        dist.destroy_process_group()


def leave(status):
    """End this process with ``status``, the exit status that `sys.exit` takes of a command, without finalising Python.

    A thread of gloo that frees a tensor asks for the interpreter's lock; one that does so during finalisation aborts the
    process, whatever it had done (seen on torch 2.6.0 with busy cores, in one of some twenty runs).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
