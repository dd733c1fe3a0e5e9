"""The `--overlap kernel` plugin: chunked functional collectives, compiled, scheduled by our Inductor passes.

Importable in the original archive as it is, once `compile_overlap` is installed.
"""

from compile_overlap import check_settings, forward_ffn, plan_of, tune, watched

__all__ = ["check_settings", "forward_ffn", "plan_of", "tune", "watched"]
