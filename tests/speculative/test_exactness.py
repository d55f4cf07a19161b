"""Drafts never change the law of the output: proved by enumeration, with exact fractions.

The production functions (path_match, cut_at_stop, StopChecker, DraftPool) are fed every token that the target
can give at every node they ask about, each with its exact weight. What a round commits is completed by plain
decoding, and the joint law must equal plain decoding's, difference zero. Each way of being silently wrong is
planted beside it, and the same comparison must notice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from random import Random

import pytest

from speculative.acceptance.path_match import Match, path_match
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.history import History
from speculative.stop import FinishReason, StopChecker, cut_at_stop
from speculative.tree import EMPTY_TREE, ROOT, TokenTree
from tests.speculative.enumeration import (
    PROMPT,
    RULES,
    Ids,
    Joint,
    Law,
    Rules,
    Sample,
    Weights,
    outcomes,
    penalised,
    plain,
    random_law,
)

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
