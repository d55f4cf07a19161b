"""A draft: drafted tokens as a tree below the last committed token; knows nothing of sessions or sources.

Node i carries `tokens[i]` and continues node `parents[i]`, or the last committed token where that is -1
(ROOT). A parent precedes its child. Proposers inside the verifier and rankings of corpora return drafts; a
`Fragment` is a draft with the prefix that it continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from speculative.errors import MalformedDraft
from speculative.tree import ROOT

MAX_DRAFT_NODES = 255


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of 1 to 255 drafted tokens; every field has one entry per node.

    Raises:
        MalformedDraft: see `check_nodes`.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Node index of each node's parent; -1 (ROOT) for a node that continues the last committed token."""
    survival: tuple[float, ...]
    """Estimated probability that the whole path from the root to this node is accepted."""

    def __post_init__(self) -> None:
        check_nodes(self.tokens, self.parents, self.survival)

    def __len__(self) -> int:
        return len(self.tokens)


def check_nodes(tokens: Sequence[int], parents: Sequence[int], survival: Sequence[float]) -> None:
    """Checks the nodes of a draft.

    Raises:
        MalformedDraft: no node or more than 255, fields of unequal length, a negative token id, a parent that
            does not precede its child, or a survival outside [0, 1].
    """
    count = len(tokens)
    if not 1 <= count <= MAX_DRAFT_NODES:
        raise MalformedDraft(f"a draft has {count} nodes; send 1 to {MAX_DRAFT_NODES}")
    if not count == len(parents) == len(survival):
        raise MalformedDraft(
            f"a draft of {count} tokens has {len(parents)} parents, {len(survival)} survivals"
        )
    if min(tokens) < 0:
        raise MalformedDraft(f"a draft holds the negative id {min(tokens)}")
    for node, (parent, probability) in enumerate(zip(parents, survival, strict=True)):
        if not ROOT <= parent < node:
            raise MalformedDraft(f"draft node {node} has parent {parent}; a parent precedes its child")
        if not 0 <= probability <= 1:
            raise MalformedDraft(f"draft node {node} has survival {probability}; it must be within [0, 1]")
