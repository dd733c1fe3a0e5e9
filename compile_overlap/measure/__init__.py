"""What ran beside what on the devices, and how much of the communication it hid. See `figures` for what is measured."""

from .figures import Times, slowest, time_figures, trace_figures
from .kineto import Call, calls_of, profiled

__all__ = ["Call", "Times", "calls_of", "profiled", "slowest", "time_figures", "trace_figures"]
