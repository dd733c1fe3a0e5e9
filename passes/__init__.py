"""FX and scheduler passes over the graphs that hold our exchanges: see `pipeline` for their order."""

from .pipeline import config_patches, install, pass_log

__all__ = ["config_patches", "install", "pass_log"]
