"""The correction of a source's estimates: nothing without evidence, true with it, and never falling."""

import random

import pytest

from speculative.survival_curve import SurvivalCurve

ESTIMATES = [number / 200 for number in range(201)]


def taught(true_of: "dict[float, float]", rounds: int, prior: SurvivalCurve | None = None) -> SurvivalCurve:
    """A curve that saw these estimates, each right as often as the table says."""
    curve, chance = SurvivalCurve(prior, strength=24.0), random.Random(7)
    for _ in range(rounds):
        for estimate, true in true_of.items():
            curve.saw(estimate, chance.random() < true)
    return curve


def test_without_evidence_the_estimates_stand() -> None:
    curve = SurvivalCurve()
    assert [curve.worth(estimate) for estimate in ESTIMATES] == pytest.approx(ESTIMATES)


def test_overconfident_estimates_become_true() -> None:
    true_of = {0.99: 0.6, 0.85: 0.4, 0.35: 0.1, 0.03: 0.01}
    curve = taught(true_of, 400)
    for estimate, true in true_of.items():
        assert curve.worth(estimate) == pytest.approx(true, abs=0.09)


def test_the_curve_never_falls_whatever_it_saw() -> None:
    curve, chance = SurvivalCurve(SurvivalCurve()), random.Random(3)
    for _ in range(3000):
        curve.saw(chance.random(), chance.random() < 0.5)
    values = [curve.worth(estimate) for estimate in ESTIMATES]
    assert values == sorted(values)
    assert values[0] >= 0
    assert values[-1] <= 1


def test_a_new_session_begins_with_what_others_taught() -> None:
    worker = SurvivalCurve(strength=24.0)
    taught({0.9: 0.3}, 400, worker)
    session = SurvivalCurve(worker)
    assert session.worth(0.9) == pytest.approx(0.3, abs=0.12)
    assert [session.worth(each) for each in ESTIMATES] == pytest.approx(list(map(worker.worth, ESTIMATES)))


def test_one_session_leaves_its_own_text_for_itself() -> None:
    worker = SurvivalCurve(strength=24.0)
    taught({0.9: 0.9}, 400, worker)
    odd = taught({0.9: 0.1}, 60, worker)
    assert odd.worth(0.9) < 0.5 < SurvivalCurve(worker).worth(0.9)
