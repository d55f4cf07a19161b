"""Proposers, the sources inside this worker: their table, and what the engine asks of each.

A proposer drafts for one session from its tokens alone; it knows neither the target nor the other sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.wire.names import GRAMMAR, LOOKUP_BELOW, PREDICTION, REFERENCES
from speculative.draft import Draft
from speculative.grammar import Matcher
from speculative.implementations import load_implementation
from speculative.lookup.session_text import SessionText

PROPOSERS = {
    GRAMMAR: "verifier_service.proposers.own_text.forced:ForcedProposer",
    "lookup": "verifier_service.proposers.own_text.lookup:LookupProposer",
    PREDICTION: "verifier_service.proposers.own_text.prediction:PredictionProposer",
    REFERENCES: "verifier_service.proposers.own_text.prediction:ReferencesProposer",
}
"""Source name to "module:class" of a Proposer, which is constructed from a `ProposerInit`."""
LEAF_PROPOSERS = {LOOKUP_BELOW: "verifier_service.proposers.own_text.lookup:LookupBelow"}
"""Source name to "module:class" of a LeafProposer, which is constructed from a `ProposerInit`."""
BATCHED_PROPOSERS = {
    "bigram": "verifier_service.proposers.bigram:plan",
    "jacobi": "verifier_service.proposers.jacobi:plan",
    "lookahead": "verifier_service.proposers.lookahead:plan",
    "recycling": "verifier_service.proposers.recycling:plan",
}
"""Source name to "module:function" that makes a ProposerPlan of a ProposerConfig."""


@dataclass(frozen=True, slots=True)
class ProposerInit:
    """The fields of a request that its session's proposers need."""

    prompt_length: int
    """Length of the prompt, in tokens."""
    prediction: tuple[int, ...] = ()
    """Token ids that the answer may resemble; empty: the request predicts nothing."""
    references: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that the answer may copy from, text by text."""
    grammar: Matcher | None = None
    """The grammar of the answer, after the committed tokens; None: any text."""
    text: SessionText = field(default_factory=SessionText)
    """The session's own text, which its proposers share."""


class Proposer(Protocol):
    """Drafts for one session. Both methods run on the engine's thread and have to take microseconds."""

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the session's text: the prompt first, then what the target commits."""

    def propose(self, node_limit: int) -> Draft | None:
        """A draft of at most `node_limit` nodes that may follow the last token, or None."""


class LeafProposer(Protocol):
    """Drafts below what other sources have drafted. As a Proposer, it has to take microseconds."""

    def append(self, tokens: Sequence[int]) -> None:
        """As a Proposer's."""

    def propose_below(self, path: Sequence[int], most: int) -> Draft | None:
        """A draft of at most `most` nodes that may follow the session's text and this path, or None."""


def make_proposer(name: str, init: ProposerInit) -> Proposer:
    """Constructs the proposer of the table that has this name. Raises KeyError for an unknown name."""
    proposer: Proposer = load_implementation(PROPOSERS, name)(init)
    return proposer


def make_leaf_proposer(name: str, init: ProposerInit) -> LeafProposer:
    """Constructs the leaf proposer of the table that has this name. Raises KeyError for an unknown name."""
    proposer: LeafProposer = load_implementation(LEAF_PROPOSERS, name)(init)
    return proposer
