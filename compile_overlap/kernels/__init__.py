"""Triton kernels, and what they and the operators ask of the device and its libraries."""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.lru_cache(maxsize=None)
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=None)
def loaded_library(name: str) -> ctypes.CDLL:
    """A CUDA library that torch has loaded into this process, by its file's name without version, `libcudart.so` say."""
    with open("/proc/self/maps") as maps:
        return ctypes.CDLL(min(line.split()[-1] for line in maps if f"/{name}" in line))
