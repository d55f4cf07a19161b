"""Processor time of a step by part, from wrappers around the methods that do the parts.

A part's time excludes the parts that it calls. The wrappers stay for the rest of the process.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from outrider.lm.runner import PackedLM
from verifier_service.engine.core import EngineCore
from verifier_service.engine.draft_budget import DraftBudget
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool

METHODS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("merge", EngineCore, ("apply",)),
    ("schedule", EngineCore, ("begin",)),
    ("propose", SessionPool, ("prepare",)),
    ("rank", Session, ("ranking", "step_rows")),
    ("rank", DraftBudget, ("admit", "asks_for_drafts")),
    ("plan", KVCache, ("sequence_rows",)),
    ("around_model", PackedLM, ("forward",)),
    ("choose", SessionPool, ("match_all",)),
    ("commit", Session, ("commit", "skip")),
    ("bookkeeping", EngineCore, ("finish",)),
    ("publish", EngineCore, ("published",)),
)
"""Each part, and the methods whose time it is."""
MODEL = "model"
PARTS = (*dict.fromkeys(part for part, _, _ in METHODS), MODEL)


class PartTimer:
    """Times the parts of steps, one step at a time."""

    def __init__(self) -> None:
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = [0.0]
        """Seconds spent in timed calls inside each running call."""
        self._steps: list[dict[str, float]] = []

    def install(self, target: PackedLM) -> None:
        """Wraps every method of METHODS, and the model's own forward."""
        for part, owner, names in METHODS:
            for name in names:
                setattr(owner, name, self.timed(part, getattr(owner, name)))
        computes: Any = target.model if target.compiled is None else target.compiled
        computes.forward = self.timed(MODEL, computes.forward)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its own time added to a part."""
        inner, now, clock = self._inner, self._now, time.thread_time

        @functools.wraps(call)
        def wrapped(*positional: Any, **named: Any) -> Any:
            inner.append(0.0)
            began = clock()
            try:
                return call(*positional, **named)
            finally:
                spent = clock() - began
                now[part] += spent - inner.pop()
                inner[-1] += spent

        return wrapped

    def drop(self) -> None:
        """Forgets what was timed since the last step."""
        self._now.clear()

    def step_done(self) -> None:
        """Ends a step."""
        self._steps.append(dict(self._now))
        self._now.clear()

    def medians(self) -> dict[str, float]:
        """Median milliseconds of each part over the steps since the last call."""
        steps, self._steps = self._steps, []
        return {part: round(median(step.get(part, 0.0) for step in steps) * 1e3, 4) for part in PARTS}
