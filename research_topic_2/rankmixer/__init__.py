"""One RankMixer block with an expert-parallel per-token FFN, and the tools that check and time it."""

from rankmixer.block import RankMixerBlock
from rankmixer.ffn import OVERLAP_MODES, PerTokenFFN

__all__ = ["OVERLAP_MODES", "PerTokenFFN", "RankMixerBlock"]
