"""Processor time of processes of this machine, as /proc reports it."""

import os
from pathlib import Path


def processor_s(pid: int) -> float:
    """Seconds for which all threads of a process have computed so far, to about a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
