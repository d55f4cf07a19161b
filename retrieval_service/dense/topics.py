"""When a session has moved on to something else. Pure: no clocks, no searches."""

import math
from dataclasses import dataclass

import numpy as np

from retrieval_service.dense.embeddings import Vectors


@dataclass(frozen=True, slots=True)
class TopicRule:
    """References are looked for at a session's start, and again when its last ids are about something else.

    Attributes:
        window: ids, the session's last ones, that say what it is about.
        every: at least so many new ids between two looks at the topic.
        threshold: a cosine below this between the window and the one last searched with is a move.
    """

    window: int = 64
    every: int = 64
    threshold: float = 0.8

    def __post_init__(self) -> None:
        if self.window < 1 or self.every < 1 or not math.isfinite(self.threshold):
            raise ValueError(f"window and every are at least 1, threshold is finite, not {self}")

    def is_due(self, length: int, looked_at: int | None) -> bool:
        """Whether to look at a session of `length` ids, last looked at when it had `looked_at`."""
        return length > 0 and (looked_at is None or length - looked_at >= self.every or length < looked_at)

    def has_moved(self, now: Vectors, searched_with: Vectors | None) -> bool:
        """Whether two unit vectors are of different topics; always before a first search."""
        return searched_with is None or float(np.dot(now, searched_with)) < self.threshold
