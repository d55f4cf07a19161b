"""Drafts never change the law of the output: proved by enumeration, with exact fractions.

The production functions (path_match, cut_at_stop, StopChecker, DraftPool) are fed every token that the target
can give at every node they ask about, each with its exact weight. What a round commits is completed by plain
decoding, and the joint law must equal plain decoding's, difference zero. Each way of being silently wrong is
planted beside it, and the same comparison must notice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from random import Random
from typing import TypeVar

import numpy as np
import pytest

from speculative.acceptance.path_match import Match, path_match
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from speculative.stop import FinishReason, StopChecker, cut_at_stop
from speculative.tree import EMPTY_TREE, ROOT, TokenTree

Ids = tuple[int, ...]
Weights = tuple[Fraction, ...]
Law = Callable[[Ids], Weights]
Joint = dict[Ids, Fraction]
Sample = Callable[[Weights], int]
T = TypeVar("T")

PROMPT: Ids = (0, 2)
BYTES = (b"a", b"b", b"c")


@dataclass(frozen=True)
class Rules:
    """What ends a request."""

    limit: int = len(PROMPT) + 4
    eos: frozenset[int] = frozenset()
    stops: tuple[bytes, ...] = ()
    min_tokens: int = 0

    def stop_checker(self, ids: Ids) -> StopChecker:
        return StopChecker(
            self.eos,
            self.limit,
            self.stops,
            lambda token: BYTES[token % 3],
            ids,
            len(PROMPT),
            self.min_tokens,
        )

    def applied(self, law: Law) -> Law:
        """The law with what min_tokens holds back, by the production processing."""
        return lambda ids: self.held_back(law(ids), History.of(ids, len(PROMPT)))

    def held_back(self, weights: Weights, history: History) -> Weights:
        params = SamplingParams(min_tokens=self.min_tokens, stop_ids=tuple(self.eos))
        scores = process_logits(np.zeros(len(weights)), params, history)
        left = [
            weight if score > -np.inf else Fraction(0) for weight, score in zip(weights, scores, strict=True)
        ]
        return tuple(weight / sum(left) for weight in left) if any(left) else weights


RULES = [
    Rules(),
    Rules(eos=frozenset({1})),
    Rules(stops=(b"ab", b"cc")),
    Rules(limit=len(PROMPT) + 2, eos=frozenset({2})),
    Rules(eos=frozenset({1}), stops=(b"ca", b"a"), min_tokens=2),
]


def random_law(seed: int, width: int = 3) -> Law:
    """Random rational weights for every context; zeros occur."""

    @cache
    def law(ids: Ids) -> Weights:
        random = Random(f"{seed} {ids}")
        parts = [random.randrange(5) for _ in range(width)]
        parts[random.randrange(width)] += 1
        return tuple(Fraction(part, sum(parts)) for part in parts)

    return law


def penalised(weights: Weights, output: Ids) -> Weights:
    """A presence penalty in the language of weights: a third for whatever the output has."""
    parts = [weight / 3 if token in output else weight for token, weight in enumerate(weights)]
    return tuple(part / sum(parts) for part in parts)


def outcomes(run: Callable[[Sample], T]) -> Iterator[tuple[T, Fraction]]:
    """Every result of `run` with its exact weight, by trying each token at each place it samples."""
    script: list[int] | None = []
    while script is not None:
        trial = Trial(script)
        yield run(trial.sample), trial.weight
        script = trial.next_script()


class Trial:
    """One run: takes the scripted choice at each place, and the first possible one past the script's end."""

    def __init__(self, script: list[int]) -> None:
        self.weight = Fraction(1)
        self._script = script
        self._taken: list[tuple[int, int]] = []  # which of how many possible tokens

    def sample(self, weights: Weights) -> int:
        possible = [token for token, weight in enumerate(weights) if weight]
        place = len(self._taken)
        choice = self._script[place] if place < len(self._script) else 0
        self._taken.append((choice, len(possible)))
        self.weight *= weights[possible[choice]]
        return possible[choice]

    def next_script(self) -> list[int] | None:
        """Counts the last place that has another token up by one; None when all is tried."""
        taken = self._taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return None
        return [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


def plain(law: Law, rules: Rules) -> Callable[[Ids], Joint]:
    """The law of plain decoding from any ids on."""

    @cache
    def from_ids(ids: Ids) -> Joint:
        if rules.stop_checker(ids).finished:
            return {ids: Fraction(1)}
        joint: Joint = defaultdict(Fraction)
        for token, weight in enumerate(law(ids)):
            if weight:
                for whole, rest in from_ids((*ids, token)).items():
                    joint[whole] += weight * rest
        return dict(joint)

    return from_ids


Look = Callable[[TokenTree, int, Ids, Ids], Weights]
Criterion = Callable[[TokenTree, Callable[[int, Ids], int]], Match]
Commit = Callable[[StopChecker, Ids], tuple[Ids, FinishReason | None]]


def law_after_a_round(
    tree: TokenTree,
    law: Law,
    rules: Rules,
    *,
    look: Look | None = None,
    criterion: Criterion = path_match,
    commit: Commit = cut_at_stop,
) -> Joint:
    """The joint law of one round on `tree`, completed by plain decoding. What is planted replaces a part."""
    complete = plain(law, rules)
    look = look or (lambda tree, node, before, path: law(before + path))

    def round_(sample: Sample) -> tuple[Ids, FinishReason | None]:
        match = criterion(tree, lambda node, path: sample(look(tree, node, PROMPT, path)))
        committed, reason = commit(rules.stop_checker(PROMPT), match.tokens)
        return PROMPT + committed, reason

    joint: Joint = defaultdict(Fraction)
    for (ids, reason), weight in outcomes(round_):
        rest = {ids: Fraction(1)} if reason else complete(ids)
        for whole, share in rest.items():
            joint[whole] += weight * share
    return dict(joint)


def shapes(most: int) -> Iterator[Ids]:
    """Parent lists of every tree of up to `most` nodes that three tokens can tell apart."""
    for count in range(most + 1):
        for parents in product(*(range(-1, node) for node in range(count))):
            if all(parents.count(parent) <= 3 for parent in parents):
                yield parents


def tree_of(parents: Ids, random: Random) -> TokenTree:
    left: dict[int, list[int]] = {node: random.sample(range(3), 3) for node in range(-1, len(parents))}
    tokens = tuple(left[parent].pop() for parent in parents)
    sources = tuple(random.randint(1, 3) for _ in parents)
    return TokenTree(tokens, parents, (0.5,) * len(parents), sources)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_one_round_on_any_tree_keeps_the_targets_law(rules: Rules, seed: int) -> None:
    law, random = rules.applied(random_law(seed)), Random(seed)
    expected = plain(law, rules)(PROMPT)
    assert sum(expected.values()) == 1
    count = 0
    for parents in shapes(5):
        assert law_after_a_round(tree_of(parents, random), law, rules) == expected, parents
        count += 1
    assert count > 140


def drafts_for(ids: Ids, random: Random) -> Fragment:
    parents = random.choice(list(shapes(3))[1:])
    tree = tree_of(parents, random)
    back = random.randint(0, 1)
    base = ids[: len(ids) - back]
    survival = tuple(0.5 ** len(tree.path(node)) for node in range(len(tree)))
    return Fragment(random.randint(1, 3), 1, len(base), prefix_hash(base), tree.tokens, parents, survival)


def sampled_below(ids: Ids, law: Law, sample: Sample) -> Callable[[int, Ids], int]:
    return lambda node, path: sample(law(ids + path))


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("node_limit", [0, 1, 4])
def test_whole_requests_through_the_pool_keep_the_targets_law(rules: Rules, node_limit: int) -> None:
    """Round after round to the end, with drafts that differ from outcome to outcome, late ones among them."""
    law = rules.applied(random_law(4))

    def request(sample: Sample) -> Ids:
        ids, stop_checker = PROMPT, rules.stop_checker(PROMPT)
        pool = DraftPool(PROMPT, epoch=1, vocabulary_size=3, limit=rules.limit)
        random = Random(node_limit)
        while stop_checker.finished is None:
            for _ in range(2):
                pool.offer(drafts_for(ids, random))
            match = path_match(pool.best_tree(node_limit), sampled_below(ids, law, sample))
            committed, _ = cut_at_stop(stop_checker, match.tokens)
            pool.commit(committed)
            ids += committed
        return ids

    joint: Joint = defaultdict(Fraction)
    for ids, weight in outcomes(request):
        joint[ids] += weight
    assert dict(joint) == plain(law, rules)(PROMPT)


def test_trap_1_two_samples_of_one_node_change_the_law() -> None:
    def longest_of_the_branches(tree: TokenTree, target_token: Callable[[int, Ids], int]) -> Match:
        leaves = set(range(-1, len(tree))) - set(tree.parents) or {ROOT}
        matches = []
        for leaf in sorted(leaves):
            path = tree.path(leaf)
            branch = TokenTree(
                tuple(tree.tokens[n] for n in path),
                tuple(range(-1, len(path) - 1)),
                (0.5,) * len(path),
                (1,) * len(path),
            )
            matches.append(path_match(branch, target_token))
        return max(matches, key=lambda match: len(match.tokens))

    law, rules = random_law(1), Rules()
    tree = TokenTree((0, 1), (-1, -1), (0.5, 0.5), (1, 1))
    expected = plain(law, rules)(PROMPT)
    assert law_after_a_round(tree, law, rules) == expected
    assert law_after_a_round(tree, law, rules, criterion=longest_of_the_branches) != expected


def test_trap_6_penalties_with_another_nodes_prefix_change_the_law() -> None:
    base, rules = random_law(2), Rules()

    def law(ids: Ids) -> Weights:
        return penalised(base(ids), ids[len(PROMPT) :])

    def the_roots_history(tree: TokenTree, node: int, before: Ids, path: Ids) -> Weights:
        return penalised(base(before + path), before[len(PROMPT) :])

    def at_the_last_token_only(tree: TokenTree, node: int, before: Ids, path: Ids) -> Weights:
        return base(before + path) if tree.children(node) else law(before + path)

    tree = TokenTree((0, 1, 0), (-1, -1, 0), (0.5, 0.5, 0.5), (1, 1, 1))
    expected = plain(law, rules)(PROMPT)
    assert law_after_a_round(tree, law, rules) == expected
    assert law_after_a_round(tree, law, rules, look=the_roots_history) != expected
    assert law_after_a_round(tree, law, rules, look=at_the_last_token_only) != expected


def test_a_mask_by_another_nodes_depth_changes_the_law() -> None:
    """min_tokens counts the path down to the node, not the committed ids alone."""
    base, rules = random_law(3), Rules(eos=frozenset({1}), min_tokens=2)
    law = rules.applied(base)

    def the_roots_count(tree: TokenTree, node: int, before: Ids, path: Ids) -> Weights:
        return rules.held_back(base(before + path), History.of(before, len(PROMPT)))

    def at_the_root_only(tree: TokenTree, node: int, before: Ids, path: Ids) -> Weights:
        return base(before + path) if path else law(before)

    tree = TokenTree((2, 0, 0), (-1, 0, 1), (0.5, 0.5, 0.5), (1, 1, 1))
    expected = plain(law, rules)(PROMPT)
    assert min(len(ids) for ids in expected) == len(PROMPT) + 3
    assert law_after_a_round(tree, law, rules) == expected
    assert law_after_a_round(tree, law, rules, look=the_roots_count) != expected
    assert law_after_a_round(tree, law, rules, look=at_the_root_only) != expected


def test_trap_7_a_target_cut_to_the_drafters_width_changes_the_law() -> None:
    """The target has a fourth id that no drafter knows."""
    law, rules = random_law(6, width=4), Rules(limit=len(PROMPT) + 3)

    def cut_to_three(tree: TokenTree, node: int, before: Ids, path: Ids) -> Weights:
        known = law(before + path)[:3]
        return tuple(weight / sum(known) for weight in known) if any(known) else law(before + path)

    tree = TokenTree((0, 1), (-1, 0), (0.5, 0.5), (1, 1))
    expected = plain(law, rules)(PROMPT)
    assert any(3 in ids for ids in expected)
    assert law_after_a_round(tree, law, rules) == expected
    assert law_after_a_round(tree, law, rules, look=cut_to_three) != expected


@pytest.mark.parametrize(
    "rules",
    [Rules(eos=frozenset({0})), Rules(stops=(b"ab",)), Rules(limit=len(PROMPT) + 1)],
    ids=["end of sequence", "stop string", "limit"],
)
def test_trap_8_committing_past_the_end_changes_the_law(rules: Rules) -> None:
    def whole_run(stop_checker: StopChecker, tokens: Ids) -> tuple[Ids, FinishReason | None]:
        return tokens, cut_at_stop(stop_checker, tokens)[1]

    def last_token_only(stop_checker: StopChecker, tokens: Ids) -> tuple[Ids, FinishReason | None]:
        return tokens, stop_checker.push(tokens[-1])

    law = random_law(5)
    tree = TokenTree((0, 1, 2), (-1, 0, 1), (0.5, 0.5, 0.5), (1, 1, 1))
    expected = plain(law, rules)(PROMPT)
    assert law_after_a_round(tree, law, rules) == expected
    assert law_after_a_round(tree, law, rules, commit=whole_run) != expected
    assert law_after_a_round(tree, law, rules, commit=last_token_only) != expected


def test_the_enumeration_itself_is_complete() -> None:
    law = random_law(7)
    weights = [weight for _, weight in outcomes(lambda sample: sample(law(PROMPT)))]
    assert sum(weights) == 1
    assert law_after_a_round(EMPTY_TREE, law, Rules()) == plain(law, Rules())(PROMPT)
