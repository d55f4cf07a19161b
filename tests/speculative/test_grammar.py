"""A grammar masks every node with its own state: shown by enumeration, as in test_exactness, and id by id."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from speculative.acceptance.path_match import path_match
from speculative.digest import HostDigest
from speculative.draft_pool import DraftPool
from speculative.errors import EmptySupport, InvalidRequest
from speculative.fragment import Fragment
from speculative.grammar import ForcedToken, Grammar, GrammarKind, Matcher
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import process_logits, sample_token
from speculative.stop import cut_at_stop
from speculative.target_sampler import TargetSampler
from speculative.tree import TokenTree
from tests.speculative.test_exactness import (
    PROMPT,
    Ids,
    Joint,
    Law,
    Rules,
    Sample,
    Weights,
    drafts_for,
    law_after_a_round,
    outcomes,
    plain,
    random_law,
    shapes,
    tree_of,
)

# What may follow, by what was generated: strings over 0, 1 and 2 in which no id stands twice in a row, 2 is
# never first, and the third is not the first again.
Rule = Callable[[Ids], set[int]]


def no_repeats(output: Ids) -> set[int]:
    barred = {2} if not output else {output[-1]}
    if len(output) == 2:
        barred.add(output[0])
    return {0, 1, 2} - barred


@dataclass
class Toy:
    """A matcher that keeps what was committed."""

    rule: Rule
    output: Ids = ()
    width: int = 3

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self.width, np.bool_)
        mask[list(self.rule((*self.output, *path)))] = True
        return mask

    def forced(self, most: int) -> list[ForcedToken]:
        chain: list[int] = []
        while len(chain) < most and len(last := self.rule((*self.output, *chain))) == 1:
            chain += last
        return [ForcedToken(token, only=True) for token in chain]

    def off_path_matcher(self) -> "Toy":
        return self

    def commit(self, tokens: Sequence[int]) -> None:
        self.output = (*self.output, *tokens)


class RootsMask(Toy):
    """Planted: every node gets the mask of the last committed id."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        return super().allowed(())


class LastNodesDepth(Toy):
    """Planted: the state after the path without its last id."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        return super().allowed(path[:-1])


def masked(weights: Weights, mask: NDArray[np.bool_]) -> Weights:
    """In the language of weights, by the production processing."""
    scores = process_logits(np.zeros(len(weights)), SamplingParams(), History.of(PROMPT, len(PROMPT)), mask)
    # Every allowed id can come, so that no law has an empty support.
    left = [
        weight + Fraction(1, 7) if score > -np.inf else Fraction(0)
        for weight, score in zip(weights, scores, strict=True)
    ]
    return tuple(weight / sum(left) for weight in left)


def grammar_law(base: Law) -> Law:
    return lambda ids: masked(base(ids), Toy(no_repeats, ids[len(PROMPT) :]).allowed(()))


RULES = [Rules(), Rules(eos=frozenset({2})), Rules(stops=(b"ab",)), Rules(limit=len(PROMPT) + 2)]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_one_round_on_any_tree_keeps_the_masked_law(rules: Rules) -> None:
    base, random = random_law(11), Random(11)
    expected = plain(grammar_law(base), rules)(PROMPT)
    assert all(no_repeats(ids[2:n]) >= {ids[n]} for ids in expected for n in range(2, len(ids)))

    def look(matcher: Matcher) -> Any:
        return lambda tree, node, before, path: masked(base(before + path), matcher.allowed(path))

    differs: defaultdict[type[Toy], int] = defaultdict(int)
    law = grammar_law(base)
    for parents in shapes(4):
        tree = tree_of(parents, random)
        assert law_after_a_round(tree, law, rules, look=look(Toy(no_repeats))) == expected, parents
        for planted in (RootsMask, LastNodesDepth):
            found = law_after_a_round(tree, law, rules, look=look(planted(no_repeats)))
            differs[planted] += found != expected
    assert min(differs[RootsMask], differs[LastNodesDepth]) > 10


def forced_fragment(ids: Ids, prefix_hash: int, chain: Sequence[ForcedToken]) -> Fragment:
    """What the grammar forces, as a source of its own."""
    return Fragment(
        source=2,
        epoch=1,
        base=len(ids),
        prefix_hash=prefix_hash,
        tokens=tuple(forced.token for forced in chain),
        parents=tuple(range(-1, len(chain) - 1)),
        survival=(1.0,) * len(chain),
    )


@pytest.mark.parametrize("node_limit", [0, 4])
def test_whole_requests_keep_the_masked_law(node_limit: int) -> None:
    base, rules = random_law(12), Rules(eos=frozenset({2}))

    def request(sample: Sample) -> Ids:
        ids, stop_checker, matcher = PROMPT, rules.stop_checker(PROMPT), Toy(no_repeats)
        pool = DraftPool(PROMPT, epoch=1, vocabulary_size=3, limit=rules.limit)
        random = Random(node_limit)
        while stop_checker.finished is None:
            for _ in range(2):
                pool.offer(drafts_for(ids, random))
            if chain := matcher.forced(2):
                pool.offer(forced_fragment(ids, pool.hash_at(len(ids)), chain))

            def token(node: int, path: Ids, ids: Ids = ids) -> int:
                return sample(masked(base(ids + path), matcher.allowed(path)))

            committed, _ = cut_at_stop(stop_checker, path_match(pool.best_tree(node_limit), token).tokens)
            matcher.commit(committed)
            pool.commit(committed)
            ids += committed
        return ids

    joint: Joint = defaultdict(Fraction)
    for ids, weight in outcomes(request):
        joint[ids] += weight
    assert dict(joint) == plain(grammar_law(base), rules)(PROMPT)


def decode(params: SamplingParams, matcher: Toy, drafts: bool, asked: Logprobs | None = None) -> Any:
    """Twelve ids with real noise; drafted are whole trees over what the grammar has, right and wrong."""
    ids: Ids = (3, 1)
    logprobs: list[Any] = []
    history, noise = History.of(ids, 2), NoiseRows(5, 6)
    while len(ids) < 14:
        tree = TokenTree(
            (0, 1, 2, 0, 1, 2, 0, 1, 2, 4), (-1, -1, -1, 0, 0, 1, 1, 2, 5, 0), (0.5,) * 10, (1,) * 10
        )
        tree = tree if drafts else TokenTree((), (), (), ())

        def logits(node: int, ids: Ids = ids, tree: TokenTree = tree) -> NDArray[np.float32]:
            before = (*ids, *(tree.tokens[n] for n in tree.path(node)))
            return np.random.default_rng(before[-3:]).normal(size=6).astype(np.float32) * 2

        target = TargetSampler(
            params, history, noise, len(ids), lambda node, of=logits: HostDigest(of(node)), matcher
        )
        match = target.with_logprobs(path_match(tree, target), asked)
        tokens = match.tokens[: 14 - len(ids)]
        logprobs += match.logprobs[: len(tokens)]
        matcher.commit(tokens)
        for token in tokens:
            history.extend([token])
        ids += tokens
    return ids[2:], logprobs


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.9, top_k=2, min_p=0.1, repetition_penalty=1.3, logit_bias=((4, 50.0),)),
        SamplingParams(temperature=0.9, min_tokens=6, stop_ids=(1, 5)),
    ],
    ids=["greedy", "sampled", "cut", "held back"],
)
def test_the_target_takes_only_what_the_grammar_has_at_that_node(params: SamplingParams) -> None:
    expected, _ = decode(params, Toy(no_repeats, width=6), drafts=False)
    assert all(expected[n] in no_repeats(expected[:n]) for n in range(12))
    assert len(set(expected)) == 3
    drafted, _ = decode(params, Toy(no_repeats, width=6), drafts=True)
    assert drafted == expected
    for planted in (RootsMask, LastNodesDepth):
        wrong, _ = decode(params, planted(no_repeats, width=6), drafts=True)
        assert wrong != expected


def test_processed_logprobs_are_masked_at_their_own_node_and_raw_ones_are_not() -> None:
    params = SamplingParams(temperature=0.9)
    for of in LogprobsOf:
        asked = Logprobs(5, of)
        ids, plainly = decode(params, Toy(no_repeats, width=6), drafts=False, asked=asked)
        again, logprobs = decode(params, Toy(no_repeats, width=6), drafts=True, asked=asked)
        assert (again, logprobs) == (ids, plainly)
        barred = [not set(one.top_ids) <= no_repeats(ids[:n]) for n, one in enumerate(logprobs)]
        assert any(barred) == (of is LogprobsOf.RAW)


WIDTH = 8
HISTORY = History.of((1, 2), 2)


def only(*ids: int) -> NDArray[np.bool_]:
    mask = np.zeros(WIDTH, np.bool_)
    mask[list(ids)] = True
    return mask


def test_the_mask_comes_after_the_bias_and_before_the_cuts() -> None:
    logits = np.arange(WIDTH, dtype=np.float32)
    biased = SamplingParams(temperature=1.0, logit_bias=((7, 100.0),), top_k=2)
    scores = process_logits(logits, biased, HISTORY, only(1, 2, 3))
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [2, 3]
    greedy = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
    assert sample_token(logits, greedy, HISTORY, None, only(1, 2, 3)) == 3
    assert sample_token(logits, SamplingParams(temperature=0.0), HISTORY, None, only(1, 2)) == 2
    noise = np.zeros(WIDTH)
    assert sample_token(logits, SamplingParams(), HISTORY, noise, only(0, 4)) == 4
    assert logits.tolist() == list(range(WIDTH)), "the logits are left as they were"


def test_min_tokens_holds_the_end_back_while_the_grammar_has_anything_else() -> None:
    logits = np.arange(WIDTH, dtype=np.float32)
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_ids=(6, 7))
    assert sample_token(logits, params, HISTORY, None, only(2, 6, 7)) == 2
    assert sample_token(logits, params, HISTORY, None, only(6, 7)) == 7
    mask = only(2, 6)
    process_logits(logits, params, HISTORY, mask)
    assert mask.tolist() == only(2, 6).tolist()


def test_a_grammar_that_leads_nowhere_is_an_empty_support() -> None:
    with pytest.raises(EmptySupport):
        sample_token(np.zeros(WIDTH, np.float32), SamplingParams(temperature=0.0), HISTORY, None, only())


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "", "json_schema has 0 bytes; give 1 to 65536"),
        ("json_schema", "x" * 65_537, "json_schema has 65537 bytes"),
        ("json_schema", "{nope", "json_schema is no JSON"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", '{"a":' * 6_000 + "1" + "}" * 6_000, "nested too deeply"),
        ("regex", "", "regex has 0 bytes; give 1 to 8192"),
        ("regex", "é" * 4_097, "regex has 8194 bytes"),
        ("json_object", "{}", "json_object stands alone"),
        ("lark", "", "lark has 0 bytes; give 1 to 65536"),
    ],
)
def test_what_can_be_no_grammar_is_refused_by_name(kind: str, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Grammar(GrammarKind(kind), text)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "choice has 0 texts; give 1 to 1024"),
        (["a"] * 1_025, "choice has 1025 texts"),
        (["a", ""], "choice has an empty text, number 1"),
        (["é" * 33_000], "choice has 66004 bytes; give 1 to 65536"),
    ],
)
def test_what_can_be_no_choice_is_refused_by_name(texts: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Grammar.one_of(texts)


def test_a_grammar_and_ignore_eos_cannot_be_together() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    grammar.check_with(SamplingParams(min_tokens=3))
    with pytest.raises(InvalidRequest, match="ignore_eos cannot be together with regex"):
        grammar.check_with(SamplingParams(ignore_eos=True))
