"""Passages that a tiny target taught, and orders for lessons on them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.learning.order import LessonOrder
from outrider.learning.passages import Passage, to_bytes
from outrider.lm.load.model import load_model


def taught(model: Path, sessions: int, seed: int = 0) -> list[Passage]:
    """Passages of random ids with what this model says of them."""
    target = load_model(str(model), device="cpu", dtype="float32")
    target.set_attn_implementation("sdpa")
    found = []
    for session in range(sessions):
        ids = np.random.default_rng((seed, session)).integers(2, 96, 40).astype(np.uint32)
        with torch.inference_mode():
            logits = target(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        tops = logits.log_softmax(-1)[7:-1].topk(8)
        found.append(
            Passage(
                "ann",
                session,
                0,
                ids,
                tops.indices.numpy().astype(np.uint32),
                tops.values.numpy().astype(np.float16),
                np.ones(32, dtype=bool),
            )
        )
    return found


def packed(lessons: list[Passage], exams: list[Passage]) -> bytes:
    first = to_bytes(lessons)
    return len(first).to_bytes(8, "little") + first + to_bytes(exams)


def order(source: Path, out: Path, **given: Any) -> LessonOrder:
    values: dict[str, Any] = {
        "source": str(source),
        "others": {},
        "version": 0,
        "out": str(out),
        "candidate": 1,
        "steps": 30,
        "rate": 3e-3,
        "memory_mb": 4096,
        "cores": 1,
        "seconds": 60,
    }
    return LessonOrder(**values | given)
