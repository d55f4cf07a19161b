"""Children of a node: ranked as the target chooses, each with a probability."""

import numpy as np
import pytest

from drafter_service.draft_tree import Growth
from drafter_service.ranking import ChildRanker
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.sampling import sample_token

WIDTH, IDS, SEED = 40, (3, 5, 3, 9), 12


def ranking(
    params: SamplingParams, *, children: int = 3, scale: float = 1.0, width: int = WIDTH, bound: int = WIDTH
) -> ChildRanker:
    growth = Growth(children=children, scale=scale)
    return ChildRanker(params, SEED, IDS, 2, width=width, bound=bound, growth=growth)


def logits(seed: int) -> np.ndarray:
    drawn: np.ndarray = np.random.default_rng(seed).normal(0, 3, WIDTH).astype(np.float32)
    return drawn


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=2.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.3, top_k=5, min_p=0.05),
        SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=1.0, logit_bias=((7, 4.0), (8, -4.0))),
        SamplingParams(temperature=0.7, min_tokens=4, stop_ids=tuple(range(0, WIDTH, 2))),
    ],
    ids=["greedy", "greedy-penalised", "sampled", "cut", "all", "ends late"],
)
def test_the_first_child_is_what_a_target_of_these_logits_chooses(params: SamplingParams) -> None:
    ranks = ranking(params)
    for seed in range(50):
        path = (seed % WIDTH, 9)[: seed % 3] if ranks.reads_path else ()
        position = len(IDS) + len(path)
        history = History.of(IDS, 2).with_path(path)
        chosen = sample_token(logits(seed), params, history, gumbel(SEED, position, WIDTH))
        assert ranks.children(logits(seed), position, path)[0][0] == chosen


def test_children_come_in_order_and_share_at_most_one() -> None:
    children = ranking(SamplingParams(temperature=0.9), children=6).children(logits(1), 4, ())
    shares = [share for _, share in children]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert len({token for token, _ in children}) == 6


def test_equals_are_ranked_by_id() -> None:
    flat = np.zeros(WIDTH, dtype=np.float32)
    assert [token for token, _ in ranking(SamplingParams(temperature=0)).children(flat, 4, ())] == [0, 1, 2]


def test_greedy_survival_is_the_softmax_of_logits_over_the_scale() -> None:
    scores = logits(2)
    weights = np.exp(scores.astype(float) / 1.7)
    for token, share in ranking(SamplingParams(temperature=0), scale=1.7).children(scores, 4, ()):
        assert share == pytest.approx(weights[token] / weights.sum(), rel=1e-5)


def test_a_score_is_a_logit_and_the_noise_times_the_temperature() -> None:
    temperature = 0.6
    scores = logits(3) + temperature * gumbel(SEED, 4, WIDTH)
    weights = np.exp(scores / 1.7)
    for token, share in ranking(SamplingParams(temperature=temperature), scale=1.7).children(
        logits(3), 4, ()
    ):
        assert share == pytest.approx(weights[token] / weights.sum(), rel=1e-5)


def test_ids_past_the_bound_are_no_children_but_take_their_share() -> None:
    scores = np.zeros(WIDTH, dtype=np.float32)
    scores[30] = 5
    children = ranking(SamplingParams(temperature=0), bound=20).children(scores, 4, ())
    assert [token for token, _ in children] == [0, 1, 2]
    assert sum(share for _, share in children) < 0.1


def test_logits_past_the_width_and_a_bias_for_them_do_not_matter() -> None:
    scores = logits(4)
    scores[30:] = 50
    biased = SamplingParams(temperature=0.5, logit_bias=((2, 3.0), (35, 9.0)))
    children = ranking(biased, width=30, bound=30).children(scores, 4, ())
    assert children == ranking(
        SamplingParams(temperature=0.5, logit_bias=((2, 3.0),)), width=30, bound=30
    ).children(scores, 4, ())


def test_dropped_tokens_are_no_children() -> None:
    assert len(ranking(SamplingParams(temperature=1, top_k=2)).children(logits(5), 4, ())) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_rank_nothing_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(EmptySupport):
        ranking(SamplingParams(temperature=temperature)).children(
            np.full(WIDTH, bad, dtype=np.float32), 4, ()
        )


def test_the_models_own_logits_are_left_as_they_were() -> None:
    scores = logits(6)
    ranking(SamplingParams(temperature=0)).children(scores, 4, ())
    np.testing.assert_array_equal(scores, logits(6))
