"""Overlap of GEMM with All-to-All for an expert-parallel FFN, as a compiler problem. See `forward_ffn`."""

from .api import forward_ffn, reset
from .config import check_settings
from .explain import explain, plan_of
from .faults import RankFault, watched
from .tune import Tuning, tune

__all__ = ["RankFault", "Tuning", "check_settings", "explain", "forward_ffn", "plan_of", "reset", "tune", "watched"]
