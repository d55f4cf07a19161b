"""How the core has the time of a step's parts measured, as it reads no clock itself."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class StepMeter(Protocol):
    """Measures the time that a step spends inside the core."""

    def sampling(self) -> AbstractContextManager[None]:
        """Entered while tokens are chosen."""

    def taking_in(self) -> AbstractContextManager[None]:
        """Entered while proposers draft."""

    def proposing(self) -> AbstractContextManager[None]:
        """Entered while batched proposers draft, and while they are shown what a pass did."""

    def waited_for_drafts(self, seconds: float) -> None:
        """Records that a step was held back so long for drafts."""

    def now_s(self) -> float:
        """The time, in seconds."""


class Unmeasured:
    """The StepMeter of a caller that measures nothing."""

    def sampling(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def taking_in(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def proposing(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def waited_for_drafts(self, seconds: float) -> None:
        """Records nothing."""

    def now_s(self) -> float:
        """Always the same time."""
        return 0.0
