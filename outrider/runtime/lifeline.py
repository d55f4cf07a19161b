"""Ties a process to its parent: the process ends with the parent, even when the parent is killed."""

import ctypes
import os
import signal
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the parent's thread that started it ends.

    Where the parent ended before the request, the process id of the present parent differs from `parent_pid`;
    this process then exits at once. Raises OSError where the kernel refuses (it is not Linux).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot be tied to process {parent_pid}: {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_parent_from_flags(arguments: Sequence[str]) -> None:
    """Calls `die_with_parent` where `--parent-pid` is among the arguments of this process.

    For the first line of a `__main__`: a service's imports take seconds, in which its parent may be killed. A
    value that is no number is left to the settings, which refuse it.
    """
    for at, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag == "--parent-pid":
            pid = value if given else "".join(arguments[at + 1 : at + 2])
            if pid.isdecimal():
                die_with_parent(int(pid))
