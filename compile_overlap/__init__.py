"""Overlap of GEMM with All-to-All for an expert-parallel FFN, as a compiler problem. See `forward_ffn`."""

from .api import forward_ffn, reset
from .explain import explain
from .faults import RankFault, watched

__all__ = ["RankFault", "explain", "forward_ffn", "reset", "watched"]
