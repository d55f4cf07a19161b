"""Quiet steps: all proposers rest, so none is asked, and the rests are shortened afterwards.

Looking at each resting proposer in every step takes longer than counting, and a step of a small model takes a
millisecond or two. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from verifier_service.engine.session import Session
from verifier_service.proposers.price import ProposerPrice


class Present(NamedTuple):
    """The sessions of a step. While they stay the same, proposers have nothing new to be told."""

    sessions: list[Session]
    ready: list[Session]
    batched: list[dict[str, int]]
    """The proposers in use by each ready session."""


class QuietSteps:
    """Counts steps while all proposers of the sessions rest and the sessions stay the same."""

    def __init__(self) -> None:
        self._prices: Sequence[ProposerPrice] = ()
        self._left = 0
        self._had = 0
        self._is_quiet = False

    def plan(self, prices: Sequence[ProposerPrice], margin: int) -> None:
        """Makes the next steps quiet, down to `margin` steps before the first of these rests ends."""
        self._prices = prices
        self._left = min((price.rest_left for price in prices), default=0) - margin

    def begin_step(self, *, is_same: bool) -> bool:
        """Whether the step that begins is quiet; `is_same`: its sessions are those of the step before."""
        self._is_quiet = is_same and self._left > 0
        if not self._is_quiet:
            self.end()
        return self._is_quiet

    def end(self) -> None:
        """Ends the quiet steps, this one included: shortens the rests by those that there were."""
        if self._had:
            for price in self._prices:
                price.rest_on(self._had)
        self._had = self._left = 0
        self._is_quiet = False

    def has_step(self) -> bool:
        """Counts this step if it is quiet; returns whether it is."""
        if self._is_quiet:
            self._left -= 1
            self._had += 1
        return self._is_quiet
