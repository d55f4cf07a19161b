"""Copies from the text that a request predicts for its answer."""

from collections.abc import Sequence

from speculative.draft import Draft
from speculative.lookup import survival
from speculative.lookup.reference import ReferenceCursor
from verifier_service.proposers import ProposerInit
from verifier_service.proposers.lookup import chain, chain_survival


class PredictionProposer:
    """Follows the output through the request's prediction. A Proposer."""

    def __init__(self, init: ProposerInit) -> None:
        self._copying = ReferenceCursor(init.prediction)
        self._prompt_left = init.prompt_length
        """Tokens of the prompt that are still to come."""

    def append(self, tokens: Sequence[int]) -> None:
        """Follows the output by these tokens; those of the prompt are skipped."""
        for token in tokens[self._prompt_left :]:
            self._copying.push(token)
        self._prompt_left = max(0, self._prompt_left - len(tokens))

    def propose(self, node_limit: int) -> Draft | None:
        """A chain of at most `node_limit` tokens of the prediction, or None where the output left it."""
        copied = self._copying.draft(node_limit)
        return chain(copied.tokens, chain_survival(survival(copied.match_length)))
