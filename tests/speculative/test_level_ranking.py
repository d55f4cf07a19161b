"""Children of a whole level, ranked at once: tokens and shares as one by one, but for close calls."""

import numpy as np
import pytest

from speculative.digest import HostDigest
from speculative.errors import EmptySupport
from speculative.level_ranking import Children, level_children
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.ranking import ChildRanker

SEED, WIDTH, NODES, POSITION, SCALE, MOST = 5, 512, 6, 9, 1.3, 4


def logits(spread: float = 3.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.random.default_rng(0).standard_normal((NODES, WIDTH)) * spread).astype(np.float32)


def at_once(temperature: float, least: float = 0.0) -> list[Children]:
    noise = NoiseRows(SEED, WIDTH).at(POSITION) if temperature else None
    return level_children(logits(), noise, temperature, SCALE, [least] * NODES, MOST)


def one_by_one(temperature: float) -> list[Children]:
    params = SamplingParams(temperature=temperature)
    sizes = {"width": WIDTH, "bound": WIDTH, "children": MOST}
    ranker = ChildRanker(params, SEED, [1, 2], 2, scale=SCALE, **sizes)
    return [ranker.children(HostDigest(row), POSITION, ()) for row in logits()]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8, 1.5])
def test_they_are_those_of_each_node_alone(temperature: float) -> None:
    for found, wanted in zip(at_once(temperature), one_by_one(temperature), strict=True):
        assert [token for token, _ in found] == [token for token, _ in wanted]
        assert [share for _, share in found] == pytest.approx([share for _, share in wanted], rel=0.02)


def test_a_token_that_is_not_likely_enough_is_no_child() -> None:
    every = [child for children in at_once(0.8) for child in children]
    least = sorted(share for _, share in every)[len(every) // 2]
    kept = [child for children in at_once(0.8, least) for child in children]
    assert kept == [child for child in every if child[1] >= least]


def test_each_node_has_a_bound_of_its_own() -> None:
    noise = NoiseRows(SEED, WIDTH).at(POSITION)
    found = level_children(logits(), noise, 0.8, SCALE, [0.0, 2.0] * (NODES // 2), MOST)
    assert [len(children) for children in found] == [MOST, 0] * (NODES // 2)


def test_a_token_that_is_never_drafted_is_no_child() -> None:
    rows = logits()
    rows[:, WIDTH // 2 :] = -np.inf
    for children in level_children(rows, None, 0.0, SCALE, [1e-9] * NODES, MOST):
        assert len(children) == MOST
        assert all(token < WIDTH // 2 for token, _ in children)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_without_a_number_is_refused(value: float) -> None:
    rows = logits()
    rows[2] = value
    with pytest.raises(EmptySupport), np.errstate(invalid="ignore"):
        level_children(rows, None, 0.0, SCALE, [0.02] * NODES, MOST)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rough_ranker_gives_the_same_children(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    sizes = {"width": WIDTH, "bound": WIDTH // 2, "children": MOST}
    exact, rough = (
        ChildRanker(params, SEED, [1, 2], 2, scale=SCALE, rough=rough, **sizes) for rough in (False, True)
    )
    for row in logits():
        wanted, found = (ranker.children(HostDigest(row), POSITION, ()) for ranker in (exact, rough))
        assert found == [(token, pytest.approx(share, rel=0.02)) for token, share in wanted if share >= 1e-3]


def test_a_rough_ranker_reads_penalties_cuts_and_flat_rows_exactly() -> None:
    flat = HostDigest(np.zeros(8192, dtype=np.float32))
    sizes = {"width": 8192, "bound": 8192, "children": MOST}
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=50),
        SamplingParams(temperature=0.8, repetition_penalty=1.2),
    ):
        exact, rough = (
            ChildRanker(params, SEED, [1, 2], 2, scale=SCALE, rough=rough, **sizes) for rough in (False, True)
        )
        assert rough.children(flat, POSITION, ()) == exact.children(flat, POSITION, ())
