"""What a lesson's child process runs: it bounds itself, trains on passages, scores, and writes weights.

`python -m drafter_service.learning.child ORDER` reads passages from standard input, and prints one JSON line.
No text of a session is ever written to a file.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from drafter_service.learning.order import OUT_OF_MEMORY, LessonOrder
from outrider.runtime.lifeline import die_with_parent

_NICENESS = 19


def bound(order: LessonOrder) -> None:
    """Bounds this process: memory, processor time, priority. Call it before anything large is imported."""
    memory = order.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (order.seconds, order.seconds))
    os.nice(_NICENESS)
    # Where memory runs out all the same, the kernel ends this process before one that serves.
    Path("/proc/self/oom_score_adj").write_text("1000")


def carry_out(order: LessonOrder, data: bytes) -> dict[str, Any]:
    """Trains and scores; returns losses, and accepted places of each exam passage by version."""
    # Imported here, below the bounds.
    import torch

    from drafter_service.learning.passages import from_bytes
    from training.online import OnlineStudent, shortened

    torch.set_num_threads(order.cores)
    size = int.from_bytes(data[:8], "little")
    lessons, exams = from_bytes(data[8 : 8 + size]), from_bytes(data[8 + size :])
    scored = {version: OnlineStudent(name).accepted(exams) for version, name in sorted(order.others.items())}
    student = OnlineStudent(order.source)
    scored[order.version] = student.accepted(exams)
    losses: list[float] = []
    if order.steps and lessons:
        losses = student.learn(lessons, order.steps, order.rate, seed=order.candidate)
        scored[order.candidate] = student.accepted(exams)
        partial = Path(f"{order.out}.partial")
        student.write(str(partial))
        for file in partial.iterdir():
            _flush(file)
        os.rename(partial, order.out)
    return {"losses": shortened(losses), "accepted": scored}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def main() -> int:
    """Carries out the order of the first argument for the parent that the second one names."""
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


if __name__ == "__main__":
    sys.exit(main())
