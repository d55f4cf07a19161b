"""What the child process of a head's lesson runs: it trains a head, scores, and writes weights.

The child loads the target itself: hidden states and the target's distributions are worked out again from ids.
"""

import sys
from pathlib import Path
from typing import Any

from outrider.learning.child_process import keep, run, split
from outrider.learning.order import LessonOrder


def carry_out(order: LessonOrder, data: bytes) -> dict[str, Any]:
    """Trains and scores; returns losses, and right tokens of chains of each exam passage by version."""
    # Imported here, below the bounds.
    import torch

    from outrider.learning.passages import from_bytes
    from training.online import shortened
    from training.online_heads import HeadSchool

    torch.set_num_threads(order.cores)
    lessons, exams = map(from_bytes, split(data))
    school = HeadSchool(order.target)
    heads = {version: school.load(name) for version, name in sorted(order.others.items())}
    heads[order.version] = school.load(order.source)
    losses: list[float] = []
    if order.steps and lessons:
        heads[order.candidate] = candidate = school.load(order.source)
        losses = school.learn(candidate, lessons, order.steps, order.rate, seed=order.candidate)
        keep(Path(order.out), lambda folder: school.write(candidate, folder))
    return {"losses": shortened(losses), "accepted": school.accepted(heads, exams)}


if __name__ == "__main__":
    sys.exit(run(carry_out))
