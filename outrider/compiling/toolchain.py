"""The compiler of this machine, and the processor that it compiles for."""

import platform
import shutil
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_FIELDS = ("model name", "flags", "CPU part", "Features")
"""Lines of the system's description that tell processors apart, on x86 and on ARM."""


def find_compiler() -> str | None:
    """Path of the C++ compiler, g++; None where there is none."""
    return shutil.which("g++")


@cache
def processor_flags() -> str:
    """Model and instruction sets of the processor, as far as the system tells."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    named = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    return "".join(value for name, value in sorted(named.items()) if name.strip() in _FIELDS)
