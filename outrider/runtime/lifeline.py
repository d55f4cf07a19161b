"""Ties a process to its parent: it ends when the parent does, even when that was killed."""

import ctypes
import os
import signal
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the parent's thread that started it ends.

    A parent that ended before the kernel was asked is found by its number; this process then exits at once.
    Raises OSError where the kernel refuses (it is not Linux).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot be tied to process {parent_pid}: {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_told_parent(arguments: Sequence[str]) -> None:
    """The same where `--parent-pid` is among the arguments of this process.

    For the first line of a `__main__`: what a service imports takes seconds, in which its parent may be
    killed. What is no number is left to the settings, which say so.
    """
    for at, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag == "--parent-pid":
            told = value if given else "".join(arguments[at + 1 : at + 2])
            if told.isdecimal():
                die_with_parent(int(told))
