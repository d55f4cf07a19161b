"""Drafts what the request's grammar forces: keys and punctuation of a JSON schema, the end of a text."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from speculative.draft import Draft
from verifier_service.proposers import ProposerInit

_MOST = 16
"""The most tokens of a draft; each costs a mask, which the target's own choice of the token needs as well."""
_LIKELY = 0.9
"""Acceptance of a token whose bytes are forced, while other ids could write them."""


class ForcedProposer:
    """Drafts along the text that the grammar forces. A Proposer.

    The session's matcher stands after the committed tokens; the session moves it on.
    """

    def __init__(self, init: ProposerInit) -> None:
        self._grammar = init.grammar

    def append(self, tokens: Sequence[int]) -> None:
        """Notes nothing: the matcher follows the tokens."""

    def propose(self, node_limit: int) -> Draft | None:
        """A chain of forced tokens; those that the grammar allows alone are certain."""
        if self._grammar is None:
            return None
        chain = self._grammar.forced(min(node_limit, _MOST))
        if not chain:
            return None
        tokens = tuple(forced.token for forced in chain)
        survival = tuple(accumulate([1.0 if forced.only else _LIKELY for forced in chain], mul))
        return Draft(tokens, tuple(range(-1, len(chain) - 1)), survival)
