"""FX and scheduler passes over the graphs that hold our exchanges: see `pipeline` for their order."""

from .pipeline import PASS_NAMES, config_patches, install, pass_log

__all__ = ["PASS_NAMES", "config_patches", "install", "pass_log"]
