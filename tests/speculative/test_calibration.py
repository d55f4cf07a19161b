"""Survival estimates against what was accepted."""

from collections.abc import Mapping
from random import Random

import pytest

from speculative.calibration import Calibration, Estimated, SessionCalibrator
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash


def taught(truth: dict[float, float], count: int = 3000, seed: int = 0) -> Calibration:
    """A calibration that saw outcomes of these probabilities at these estimates."""
    random, calibration = Random(seed), Calibration()
    for _ in range(count):
        estimate = random.choice(list(truth))
        calibration.saw(estimate, random.random() < truth[estimate])
    return calibration


def test_an_estimate_is_believed_until_there_is_evidence() -> None:
    assert Calibration().worth(0.37) == pytest.approx(0.37)


def test_estimates_that_are_too_sure_are_corrected_each_at_its_own_level() -> None:
    truth = {0.99: 0.8, 0.55: 0.5, 0.25: 0.02}
    calibration = taught(truth)
    for estimate, probability in truth.items():
        assert calibration.worth(estimate) == pytest.approx(probability, abs=0.06)


def test_a_source_that_was_worthless_comes_back_when_it_deserves_to() -> None:
    calibration = taught({0.8: 0.0}, count=5000)
    assert calibration.worth(0.8) < 0.01
    for _ in range(1500):
        calibration.saw(0.8, True)
    assert calibration.worth(0.8) > 0.7


def test_a_session_leans_on_what_others_taught_and_then_on_itself() -> None:
    others = taught({0.8: 0.2})
    calibrator = SessionCalibrator([others])
    assert calibrator.worth(1, 0.8) == pytest.approx(others.worth(0.8))
    for _ in range(100):
        calibrator.saw(1, 0.8, True)
    assert calibrator.worth(1, 0.8) > 0.8


def test_the_children_of_a_committed_id_teach_what_each_would_alone() -> None:
    together = SessionCalibrator([Calibration()])
    pool = DraftPool(IDS, epoch=1, vocabulary_size=100, limit=50, calibrator=together)
    pool.offer(Fragment(1, 1, len(IDS), prefix_hash(IDS), (1, 2, 3), (-1, -1, -1), (0.6, 0.3, 0.3)))
    pool.commit([2])
    alone = SessionCalibrator([Calibration()])
    for estimate, hit in ((0.6, False), (0.3, True), (0.3, False)):
        alone.saw(1, estimate, hit)
    assert [together.worth(1, at) for at in (0.3, 0.6)] == [alone.worth(1, at) for at in (0.3, 0.6)]


def test_a_source_that_joins_later_leaves_the_others_what_they_learnt() -> None:
    first, second = Calibration(), Calibration()
    calibrator = SessionCalibrator([first])
    for _ in range(50):
        calibrator.saw(1, 0.5, False)
    before = calibrator.worth(1, 0.5)
    calibrator.use([first, second])
    assert calibrator.worth(1, 0.5) == before
    assert calibrator.worth(2, 0.5) == pytest.approx(0.5)


class Seen:
    """A calibrator that writes down what it learns and believes no estimate."""

    def __init__(self) -> None:
        self.learnt: list[tuple[int, float, bool]] = []

    def worth(self, source: int, estimate: float) -> float:
        return estimate / 2

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        self.learnt.append((source, estimate, hit))

    def followed(self, children: Mapping[int, Estimated], token: int) -> None:
        for drafted, child in children.items():
            for source, estimate in child.estimates.items():
                self.saw(source, estimate, drafted == token)


IDS = [7, 8]


def offered(
    *fragments: tuple[int, tuple[int, ...], tuple[int, ...], tuple[float, ...]],
) -> tuple[DraftPool, Seen]:
    seen = Seen()
    pool = DraftPool(IDS, epoch=1, vocabulary_size=100, limit=50, calibrator=seen)
    for source, tokens, parents, survival in fragments:
        pool.offer(Fragment(source, 1, len(IDS), prefix_hash(IDS), tokens, parents, survival))
    return pool, seen


def test_every_offered_child_of_a_committed_id_is_evidence_admitted_or_not() -> None:
    pool, seen = offered((1, (1, 2, 3), (-1, -1, 0), (0.6, 0.3, 0.3)))
    pool.commit([1, 5])
    assert sorted(seen.learnt) == [(1, 0.3, False), (1, 0.5, False), (1, 0.6, True)]


def test_what_lies_below_a_wrong_node_is_no_evidence() -> None:
    pool, seen = offered((1, (1, 2), (-1, 0), (0.6, 0.5)))
    pool.commit([4])
    assert seen.learnt == [(1, 0.6, False)]


def test_each_source_of_a_node_is_calibrated_by_its_own_estimate() -> None:
    pool, seen = offered((1, (1,), (-1,), (0.6,)), (2, (1,), (-1,), (0.9,)))
    assert pool.rank(4).survivals == pytest.approx([0.45])
    pool.commit([1])
    assert sorted(seen.learnt) == [(1, 0.6, True), (2, 0.9, True)]


def test_a_draft_that_comes_too_late_is_still_evidence() -> None:
    pool, seen = offered()
    pool.commit([1, 2])
    pool.offer(Fragment(1, 1, 2, prefix_hash(IDS), (1, 9), (-1, 0), (0.5, 0.25)))
    assert seen.learnt == [(1, 0.5, True), (1, 0.5, False)]
