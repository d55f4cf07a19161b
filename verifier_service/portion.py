"""What one session brings to one step, and what the step commits of it. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from speculative.commit import FinishReason
from speculative.logprobs import TokenLogprob
from speculative.tree import ROOT, TokenTree


class Portion(NamedTuple):
    """A session's rows in one step: a chain of committed ids, and below its last one a draft tree."""

    chain: tuple[int, ...]
    tree: TokenTree
    final: bool
    """Whether the chain reaches the last committed id, so that the step commits something."""
    candidates: int = 0
    """Drafted nodes that there were to choose from."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token of each row."""
        return self.chain + self.tree.tokens

    @property
    def parents(self) -> tuple[int, ...]:
        """Row that each row continues; -1 for what is cached already."""
        last = len(self.chain) - 1
        below = tuple(last if parent == ROOT else last + 1 + parent for parent in self.tree.parents)
        return (*range(-1, last), *below)

    @property
    def wanted(self) -> int:
        """How many rows' logits are needed."""
        return 1 + len(self.tree) if self.final else 0

    @property
    def want(self) -> tuple[int, ...]:
        """Rows whose logits are needed: the chain's last one and every node, or none."""
        return tuple(range(len(self.chain) - 1, len(self.chain) + len(self.tree))) if self.final else ()


class Round(NamedTuple):
    """What a step committed."""

    position: int
    tokens: tuple[int, ...]
    credits: bytes
    path: tuple[int, ...]
    """Rows of the portion that are committed positions now."""
    reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: Mapping[int, int] = {}
    """Nodes offered so far, by credit index."""
