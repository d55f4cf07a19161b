"""What can draft, by name, and what the engine asks of it.

A new way to draft is one file beside this one and one line in `DRAFTERS`; tests/drafter runs every entry
through the same checks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_service.follower import Abilities, Cache, Rows
from drafter_service.settings import DrafterSettings
from speculative import named

DRAFTERS = {"causal_lm": "drafter_service.drafters.causal_lm:CausalLMDrafter"}
"""Name in settings -> "module:class"; its `load` takes the service's settings."""


class Drafter(Protocol):
    """A model that extends token prefixes. All calls come from one thread.

    Attributes:
        model: its name, for people.
        tokenizer_digest: of its id -> token map; empty where it has no tokenizer.
        abilities: its sizes.
    """

    model: str
    tokenizer_digest: str
    abilities: Abilities

    def open(self, reserve: int) -> Cache:
        """An empty cache with room for `reserve` tokens. Raises Overloaded where there is none."""

    def close(self, cache: Cache) -> None:
        """Gives the cache's memory back; a second call does nothing."""

    def rewind(self, cache: Cache, length: int) -> None:
        """Keeps the first `length` committed positions, and no node."""

    def forward(self, batch: Sequence[tuple[Cache, Rows]]) -> NDArray[np.float32]:
        """One pass over all sessions: logits float32[all wanted rows, width], sessions in order.

        The rows become nodes of their caches. Raises Overloaded, with nothing changed, where memory does not
        suffice.
        """

    @property
    def cached_tokens(self) -> int:
        """Room that open caches take, in tokens."""


def load(settings: DrafterSettings) -> Drafter:
    """The drafter that the settings name, loaded.

    Raises:
        OutriderError: it cannot be had; the message says why.
    """
    drafter: Drafter = named.load(DRAFTERS, settings.drafter).load(settings)
    return drafter
