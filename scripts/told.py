"""Runs a command and, where it fails, writes its exit status to a file instead of ending with it.

`make` ends with 2 whenever a recipe fails; the Makefile turns the file into the status that was meant. Ctrl-C
reaches make, this and the command alike; an interrupt sent to make alone is passed on, since make only waits.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

INTERRUPTED = 130
LOOK_EVERY_S = 0.2


def catches_interrupts(pid: int) -> bool:
    """Whether the process has a handler for SIGINT; make takes its own away when it is interrupted."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGINT - 1) & 1)


def wait(child: subprocess.Popen[bytes], make: int) -> int:
    """The command's exit status, signals passed on meanwhile."""
    came_here: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came_here.append(number))
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    watching = catches_interrupts(make)
    while True:
        try:
            return child.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            if watching and not catches_interrupts(make):
                watching = False
                if not came_here:
                    child.send_signal(signal.SIGINT)


def main(told: Path, command: list[str]) -> int:
    make = os.getppid()
    status = wait(subprocess.Popen(command), make)
    if status in (INTERRUPTED, -signal.SIGINT):
        os.kill(make, signal.SIGINT)  # so that make, too, ends as interrupted
    elif status != 0:
        told.write_text(f"{status}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
