"""BiLD: an unsure drafter hands over, and the target rolls back what it finds too unlikely; relaxed.

Kim and others, *Speculative Decoding with Big Little Decoder* (arXiv 2302.07863).
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, check_range
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.relaxed import Place, close, cut, likeliest, reached_paths
from speculative.tree import ROOT, TokenTree

MOST_DISSENT = 256


@dataclass(frozen=True, slots=True)
class BiLD:
    """A token passes while the drafter is sure and -log p(x) is at most `rollback`."""

    promise: ClassVar[Promise] = Promise.RELAXED
    needs_q: ClassVar[bool] = False
    fallback: float = 0.0
    """The drafter hands over before a token that it gives less chance than this, by the survival of its node
    over that of the parent; 0 to 1."""
    rollback: float = 3.0
    """The most -log p(x) that is kept; 0 to 100."""
    dissent: int = MOST_DISSENT
    """A run of more consecutive tokens that are not the target's own is rolled back from its beginning; 0 to
    256."""

    def __post_init__(self) -> None:
        check_range("bild.fallback", self.fallback, 0, 1)
        check_range("bild.rollback", self.rollback, 0, 100)
        check_range("bild.dissent", self.dissent, 0, MOST_DISSENT)

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The deepest path of passing tokens up to a run of dissent, then the target's own token."""

        def passes(place: Place) -> bool:
            parent = tree.parents[place.node]
            above = 1.0 if parent == ROOT else tree.survival[parent]
            sure = tree.survival[place.node] >= self.fallback * above
            return sure and -place.logprobs[place.token] <= self.rollback

        reached = reached_paths(tree, rows, passes)
        ends = set(reached) - {tree.parents[node] for node in reached if node != ROOT}
        kept = [cut(reached[end], self._kept(reached[end].tokens, reached[end].own)) for end in sorted(ends)]
        return close(likeliest(kept), rows)

    def _kept(self, tokens: tuple[int, ...], own: tuple[int, ...]) -> int:
        """Number of leading tokens before the first run of too much dissent."""
        run = 0
        for depth, (token, target) in enumerate(zip(tokens, own, strict=True), 1):
            run = 0 if token == target else run + 1
            if run > self.dissent:
                return depth - run
        return len(tokens)
