"""What the worker asks of a drafter; each file beside this one is one kind of drafter.

A new kind is one file here and one line in `drafter_service.settings.DRAFTERS`; tests/drafter runs every
entry of that table through the same checks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_service.session import Abilities, Cache, PassRows
from drafter_service.settings import DRAFTERS, DrafterSettings
from speculative import implementations


class Drafter(Protocol):
    """A model that extends token prefixes. All calls come from one thread.

    Attributes:
        model: the model's name, for people.
        tokenizer_digest: digest of the tokenizer's id -> token map; empty without a tokenizer.
        abilities: the model's sizes.
        numerics: device, dtype and kind of the model's arithmetic.
    """

    model: str
    tokenizer_digest: str
    abilities: Abilities
    numerics: str

    def open(self, reserve: int) -> Cache:
        """Opens an empty cache with room for `reserve` tokens. Raises Overloaded without enough memory."""

    def close(self, cache: Cache) -> None:
        """Frees a cache's memory; a second call does nothing."""

    def rewind(self, cache: Cache, length: int) -> None:
        """Shortens a cache to its first `length` committed positions, and drops its nodes."""

    def forward(self, batch: Sequence[tuple[Cache, PassRows]]) -> NDArray[np.float32]:
        """One pass over all sessions: logits float32[all wanted rows, width], sessions in order.

        The rows become nodes of their caches. Raises Overloaded, with nothing changed, if memory does not
        suffice.
        """

    def shut_down(self) -> None:
        """Ends what the drafter does beside its passes; the last call."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that the open caches have room for; from any thread."""


def load(settings: DrafterSettings) -> Drafter:
    """Loads the drafter that the settings name.

    Raises:
        OutriderError: the drafter cannot be had; the message says why.
    """
    drafter: Drafter = implementations.load_implementation(DRAFTERS, settings.drafter).load(settings)
    return drafter
