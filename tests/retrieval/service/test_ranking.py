"""What of the found continuations is sent: by counts when greedy, with the session's own noise when not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_service.ranking import DraftShape, rank, reach
from retrieval_service.trie import CountedTrie, counted
from speculative.draft import Draft
from speculative.lookup import survival as per_token
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.tree import ROOT

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8)
EVERYTHING = DraftShape(nodes=255, depth=16, floor=0.0)


def found(*continuations: tuple[int, ...], match_length: int = 8) -> CountedTrie:
    trie = counted(continuations, match_length, 255)
    assert trie is not None
    return trie


def drafted(trie: CountedTrie, params: SamplingParams = GREEDY, seed: int = 3, **shape: float) -> Draft:
    draft = rank(trie, params, seed, 40, DraftShape(**{"nodes": 255, "floor": 0.0, **shape}), 255)  # type: ignore[arg-type]
    assert draft is not None
    return draft


def test_greedily_the_more_frequent_comes_first() -> None:
    draft = drafted(found((5, 6), (5, 6), (5, 7), (9,)))
    assert draft.tokens[:2] == (5, 6)
    assert draft.survival[draft.tokens.index(5)] > draft.survival[draft.tokens.index(9)]
    assert draft.survival[draft.tokens.index(6)] > draft.survival[draft.tokens.index(7)]


def test_a_longer_match_is_worth_more() -> None:
    long, short = (drafted(found((5, 6), match_length=length)) for length in (9, 2))
    assert long.survival[0] > short.survival[0]


def test_with_noise_the_rarer_wins_where_the_noise_wants_it() -> None:
    trie = found(*[(5,)] * 3, *[(9,)] * 2)
    for seed in range(60):
        row = gumbel(seed, 40, 10)
        wanted = 5 if math.log(3 / 5) + row[5] > math.log(2 / 5) + row[9] else 9
        assert drafted(trie, SAMPLED, seed).tokens[0] == wanted


def test_the_survival_with_noise_is_how_often_the_target_takes_it() -> None:
    shares = np.array([0.45, 0.25, 0.2, 0.1])
    trie = found(*[(1,)] * 45, *[(2,)] * 25, *[(3,)] * 20, match_length=9)  # 0 was never seen
    trie = CountedTrie(trie.tokens, trie.parents, trie.counts, 100, trie.match_length)
    accepted, expected, first = [], [], []
    for seed in range(3000):
        row = gumbel(seed, 40, 4)
        took = int((np.log(np.roll(shares, 1)) + row).argmax())
        draft = drafted(trie, SAMPLED, seed, softness=0.05, unseen=0.0)
        accepted.append(took in draft.tokens[:1])
        expected.append(draft.survival[0])
        first.append(took == 1)
    assert np.mean(accepted) > np.mean(first) + 0.2, "it foresees what counts alone cannot"
    prior = per_token(9)
    assert np.mean(expected) == pytest.approx(prior * np.mean(accepted), abs=0.03)
    sure = np.array(expected) > 0.95 * prior
    assert np.mean(np.array(accepted)[sure]) > 0.95 > np.mean(np.array(accepted)[~sure])


def test_what_is_too_unlikely_is_not_sent() -> None:
    trie = found(*[(5,)] * 30, (9,))
    assert drafted(trie, floor=0.05).tokens == (5,)
    assert rank(trie, GREEDY, 0, 40, DraftShape(floor=0.95), 255) is None


@given(
    continuations=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=20),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    limit=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draft_is_a_tree_within_its_bounds(
    continuations: list[list[int]], temperature: float, limit: int, seed: int
) -> None:
    trie = found(*map(tuple, continuations), match_length=3)
    params = SamplingParams(temperature=temperature)
    draft = rank(trie, params, seed, 17, EVERYTHING, limit)
    assert draft == rank(trie, params, seed, 17, EVERYTHING, limit)
    assert draft is not None
    assert len(draft.tokens) == len(draft.parents) == len(draft.survival) == min(limit, len(trie))
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens), "no sibling twice"
    for node, parent in enumerate(draft.parents):
        assert ROOT <= parent < node
        assert 0 <= draft.survival[node] <= (1.0 if parent == ROOT else draft.survival[parent])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_nothing_beyond_the_reach_of_a_match_would_have_been_sent(params: SamplingParams) -> None:
    shape = DraftShape(floor=0.05)
    reached = [reach(length, shape) for length in (1, 2, 3, 5, 20)]
    assert reached == sorted(reached)
    for length in (1, 2, 3, 5):
        draft = rank(found(tuple(range(16)), match_length=length), params, 3, 40, shape, 255)
        assert draft is None or len(draft.tokens) <= reach(length, shape)
    assert reach(1, shape) < reach(20, shape) == 16
