"""Copies from what the request says its answer may resemble; knows nothing of the target."""

from collections.abc import Sequence

from speculative.draft import Draft
from speculative.lookup import survival
from speculative.lookup.copying import Copying
from verifier_service.sources import Given
from verifier_service.sources.lookup import chain, shares


class PredictionSource:
    """Follows the output through the prediction. A LocalSource."""

    def __init__(self, given: Given) -> None:
        self._copying = Copying(given.prediction)
        self._left = given.prompt_length

    def push(self, tokens: Sequence[int]) -> None:
        """See LocalSource; what belongs to the prompt is passed over."""
        for token in tokens[self._left :]:
            self._copying.push(token)
        self._left = max(0, self._left - len(tokens))

    def draft(self, node_limit: int) -> Draft | None:
        """See LocalSource; a chain."""
        copied = self._copying.draft(node_limit)
        return chain(copied.tokens, shares(survival(copied.match_length)))
