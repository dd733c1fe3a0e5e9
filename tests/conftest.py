"""The archive double and the benchmark are importable in every test."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "research_topic_2")]
os.environ.setdefault("A2A_FFN_KERNEL_PLUGIN", "compile_overlap")
os.environ["A2A_FFN_PLANS"] = "off"  # no test takes what was tuned on this machine, or leaves anything in the user's cache
