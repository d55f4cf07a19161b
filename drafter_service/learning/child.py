"""What the child process of a drafter's lesson runs: it trains a drafter, scores, and writes weights."""

import sys
from pathlib import Path
from typing import Any

from outrider.learning.child_process import keep, run, split
from outrider.learning.order import LessonOrder


def carry_out(order: LessonOrder, data: bytes) -> dict[str, Any]:
    """Trains and scores; returns losses, and accepted places of each exam passage by version."""
    # Imported here, below the bounds.
    import torch

    from outrider.learning.passages import from_bytes
    from training.online import OnlineStudent, shortened

    torch.set_num_threads(order.cores)
    lessons, exams = map(from_bytes, split(data))
    scored = {version: OnlineStudent(name).accepted(exams) for version, name in sorted(order.others.items())}
    student = OnlineStudent(order.source)
    scored[order.version] = student.accepted(exams)
    losses: list[float] = []
    if order.steps and lessons:
        losses = student.learn(lessons, order.steps, order.rate, seed=order.candidate)
        scored[order.candidate] = student.accepted(exams)
        keep(Path(order.out), student.write)
    return {"losses": shortened(losses), "accepted": scored}


if __name__ == "__main__":
    sys.exit(run(carry_out))
