"""A toy drafter that draws windows, and the joint law of a judged round, with exact fractions."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from speculative.acceptance.criterion import Chance
from speculative.acceptance.drawn import DraftLaw, Draw, Drawn
from speculative.acceptance.path_match import Match
from speculative.stop import FinishReason, StopChecker, cut_at_stop
from speculative.tree import ROOT, TokenTree
from tests.speculative.enumeration import (
    PROMPT,
    Ids,
    Joint,
    Law,
    Rules,
    Sample,
    Weights,
    outcomes,
    plain,
)

SHORT = Rules(limit=len(PROMPT) + 3)


@dataclass
class ToyRows:
    """The toy target at each node of a round's tree, as production criteria see a target."""

    law: Callable[[Ids], Weights]
    sample: Sample
    asked: list[Ids] = field(default_factory=list)

    def __call__(self, node: int, path: Ids) -> int:
        return self.sample(self.law(path))

    def probabilities(self, node: int, path: Ids) -> Any:
        self.asked.append(path)
        return np.array(self.law(path), dtype=object)

    def log_probabilities(self, node: int, path: Ids) -> Any:
        with np.errstate(divide="ignore"):
            return np.log(np.array([float(weight) for weight in self.law(path)]))


@dataclass
class EnumeratedChance:
    """Chance whose every decision the enumeration tries both ways."""

    sample: Sample

    def below(self, probability: Any) -> bool:
        accepted = min(Fraction(1), Fraction(probability))
        return self.sample((1 - accepted, accepted)) == 1

    def choose(self, weights: Any) -> int:
        return self.sample(tuple(weights / weights.sum()))


class Window:
    """A tree as it is drawn: nodes and draws below each node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.draws: dict[int, tuple[Draw, ...]] = {}

    def child(self, parent: int, token: int) -> int:
        for node, found in enumerate(zip(self.parents, self.tokens, strict=True)):
            if found == (parent, token):
                return node
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.tokens) - 1

    def draw(self, parent: int, token: int, law: DraftLaw) -> int:
        node = self.child(parent, token)
        self.draws[parent] = (*self.draws.get(parent, ()), Draw(node, law))
        return node

    def path(self, node: int) -> Ids:
        return self.tree.path(node) if node != ROOT else ()

    def path_tokens(self, node: int) -> Ids:
        return tuple(self.tokens[above] for above in self.path(node))

    @property
    def tree(self) -> TokenTree:
        count = len(self.tokens)
        return TokenTree(tuple(self.tokens), tuple(self.parents), (0.5,) * count, (1,) * count)


def draft_law(weights: Weights) -> DraftLaw:
    ids = [token for token, weight in enumerate(weights) if weight]
    return DraftLaw(np.array(ids), np.array([weights[token] for token in ids], dtype=object))


Draft = Callable[[Law, Sample], Window]


def chain(length: int) -> Draft:
    return independent((1,) * length)


def independent(counts: Ids) -> Draft:
    """Below every node of level i, counts[i] draws with replacement."""

    def draft(q: Law, sample: Sample) -> Window:
        window, level = Window(), [ROOT]
        for count in counts:
            below = []
            for parent in level:
                weights = q(PROMPT + window.path_tokens(parent))
                for _ in range(count):
                    node = window.draw(parent, sample(weights), draft_law(weights))
                    if node not in below:
                        below.append(node)
            level = below
        return window

    return draft


def distinct(counts: Ids) -> Draft:
    """The same without replacement; fewer draws where the support runs out."""

    def draft(q: Law, sample: Sample) -> Window:
        window, level = Window(), [ROOT]
        for count in counts:
            below = []
            for parent in level:
                weights = q(PROMPT + window.path_tokens(parent))
                first = draft_law(weights)
                left: list[Fraction] = list(weights)
                for _ in range(min(count, len(first.ids))):
                    token = sample(tuple(weight / sum(left) for weight in left))
                    below.append(window.draw(parent, token, first))
                    left[token] = Fraction(0)
            level = below
        return window

    return draft


def chains(count: int, length: int) -> Draft:
    """Whole chains, drawn one by one and merged; a node has a draw for every chain that runs through it."""

    def draft(q: Law, sample: Sample) -> Window:
        window = Window()
        for _ in range(count):
            node = ROOT
            for _ in range(length):
                weights = q(PROMPT + window.path_tokens(node))
                node = window.draw(node, sample(weights), draft_law(weights))
        return window

    return draft


def with_points(draft: Draft, points: tuple[tuple[Ids, int], ...]) -> Draft:
    """Adds what a lookup offers, below nodes that are named by their tokens, behind what was drawn."""

    def both(q: Law, sample: Sample) -> Window:
        window = draft(q, sample)
        for path, token in points:
            node = ROOT
            for above in path:
                node = window.child(node, above)
            window.child(node, token)
        return window

    return both


def law_after_a_round(
    criterion: Callable[[TokenTree, ToyRows, Drawn, Chance], Match],
    p: Law,
    q: Law,
    draft: Draft,
    rules: Rules = SHORT,
    look: Law | None = None,
    cut: Callable[[StopChecker, Ids], tuple[Ids, FinishReason | None]] = cut_at_stop,
) -> Joint:
    """The joint law of one round, completed by plain decoding.

    Args:
        look: what the criterion sees of the target; None: the target.
        cut: what a round commits of its tokens.
    """
    complete, seen = plain(p, rules), look or p

    def round_(sample: Sample) -> tuple[Ids, bool]:
        window = draft(q, sample)
        rows = ToyRows(lambda path: seen(PROMPT + path), sample)
        match = criterion(window.tree, rows, window.draws, EnumeratedChance(sample))
        committed, reason = cut(rules.stop_checker(PROMPT), match.tokens)
        return PROMPT + committed, reason is not None

    joint: Joint = defaultdict(Fraction)
    for (ids, over), weight in outcomes(round_):
        for whole, share in ({ids: Fraction(1)} if over else complete(ids)).items():
            joint[whole] += weight * share
    return {ids: weight for ids, weight in joint.items() if weight}


def distance(one: Joint, other: Joint) -> Fraction:
    return (
        sum(
            (abs(one.get(ids, Fraction(0)) - other.get(ids, Fraction(0))) for ids in {*one, *other}),
            Fraction(0),
        )
        / 2
    )


POINTS = (((), 1), ((), 2), ((1,), 0), ((1, 0), 2), ((0,), 2))
"""What a lookup offers: tokens below paths of tokens."""
