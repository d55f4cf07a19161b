"""Copies from the texts that a request says its answer may resemble: its prediction, and its references."""

from collections.abc import Sequence

from speculative.draft import Draft
from speculative.lookup.reference import ReferenceFollower
from verifier_service.proposers import ProposerInit


class ReferencesProposer:
    """Follows the output through the request's references. A Proposer."""

    def __init__(self, init: ProposerInit) -> None:
        self._follower = ReferenceFollower(self._texts(init))
        self._prompt_left = init.prompt_length
        """Tokens of the prompt that are still to come."""

    def append(self, tokens: Sequence[int]) -> None:
        """Follows the output by these tokens; those of the prompt are skipped."""
        self._follower.extend(tokens[self._prompt_left :])
        self._prompt_left = max(0, self._prompt_left - len(tokens))

    def propose(self, node_limit: int) -> Draft | None:
        """A tree of at most `node_limit` tokens of the texts, or None where the output left them."""
        return self._follower.draft(node_limit)

    @staticmethod
    def _texts(init: ProposerInit) -> Sequence[Sequence[int]]:
        return init.references


class PredictionProposer(ReferencesProposer):
    """Follows the output through the request's prediction. A Proposer."""

    @staticmethod
    def _texts(init: ProposerInit) -> Sequence[Sequence[int]]:
        return (init.prediction,)
