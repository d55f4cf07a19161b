"""What every lesson's child process does: it bounds itself, carries an order out, and reports.

The process gets its order as the first argument, its parent's id as the second and passages from standard
input, and prints one JSON line. No text of a session is ever written to a file.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.learning.order import OUT_OF_MEMORY, LessonOrder
from outrider.runtime.lifeline import die_with_parent


def bound(order: LessonOrder) -> None:
    """Bounds this process: memory, processor time, priority. Call it before anything large is imported."""
    memory = order.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # One second apart: at the second limit the kernel sends SIGKILL, which does not say why.
    resource.setrlimit(resource.RLIMIT_CPU, (order.seconds, order.seconds + 1))
    # This memory holds text, so no core of it is kept. With 0 a core would still go to a handler of cores.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    # Runs only where a core is idle; the lowest priority alone would still take turns with what serves.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Where memory runs out all the same, the kernel ends this process before one that serves.
    Path("/proc/self/oom_score_adj").write_text("1000")


def split(data: bytes) -> tuple[bytes, bytes]:
    """The lessons and the exams among the bytes that a child reads, both for `passages.from_bytes`."""
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def keep(folder: Path, write: Callable[[Path], object]) -> None:
    """Has `write` fill a folder, which gets its name once every file in it is on the disk."""
    partial = folder.with_name(f"{folder.name}.partial")
    write(partial)
    for file in partial.iterdir():
        _flush(file)
    os.rename(partial, folder)


def run(carry_out: Callable[[LessonOrder, bytes], dict[str, Any]]) -> int:
    """Carries out the order of the first argument for the parent that the second one names.

    `carry_out` imports what is large; it returns `losses` and `accepted`, see `lesson.LessonResult`.
    """
    order = LessonOrder.from_json(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    bound(order)
    try:
        print(json.dumps(carry_out(order, sys.stdin.buffer.read())), flush=True)
    except MemoryError:
        return OUT_OF_MEMORY
    except (RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        # torch and the loader of libraries raise no MemoryError of their own.
        refused = ("allocate memory", "not enough memory", "bad_alloc", "failed to map")
        return OUT_OF_MEMORY if any(words in str(error) for words in refused) else 1
    return 0


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
