"""A request that is being answered here, as later calls for its session see it. Pure."""

from typing import Protocol

from speculative.errors import OutriderError


class Readers(Protocol):
    """Who waits for its ids."""

    def fail(self, error: OutriderError) -> None:
        """Nothing more will come."""


class Running:
    """One request.

    Args:
        earlier: the one that it takes the session from, if any.
    """

    def __init__(self, earlier: "Running | None" = None) -> None:
        self.cancelled = False
        self.error: OutriderError | None = None
        self.epoch: int = 0 if earlier is None else earlier.epoch
        """The highest that the session is known to have had; 0: none. One under which it was to be opened
        from here counts, as an Open can be late."""
        self._readers: Readers | None = None

    def end(self, error: OutriderError) -> None:
        """The client gets this error in place of what is still to come."""
        self.error = error
        if self._readers is not None:
            self._readers.fail(error)

    def reads(self, readers: Readers) -> None:
        """From now on `end` reaches them."""
        self._readers = readers
        if self.error is not None:
            readers.fail(self.error)

    def opens(self, epoch: int) -> None:
        """It is about to be opened under this epoch. Raises what it was ended with: one that was taken over
        must not take the session back from the request that has it."""
        if self.error is not None:
            raise self.error
        self.epoch = max(self.epoch, epoch)
