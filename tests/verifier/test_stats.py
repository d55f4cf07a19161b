"""The engine's statistics: exact quantiles of the last values, histograms of all, bounded counts by name."""

import pytest

from verifier_service.engine.stats import (
    BUCKETS_MS,
    LAST_PLACE,
    MOST_NAMES,
    OTHER,
    CountsByName,
    Samples,
    SourceCounts,
    Timings,
)


def test_quantiles_are_those_of_the_last_values() -> None:
    samples = Samples(capacity=100)
    for value in range(250):
        samples.add(float(value))
    assert len(samples) == 100
    assert samples.quantile(0.0) == 150.0
    assert samples.quantile(0.5) == 200.0
    assert samples.quantile(0.99) == 249.0
    assert samples.quantile(1.0) == 249.0


def test_no_value_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="no value"):
        Samples().quantile(0.5)


def test_histograms_keep_every_value() -> None:
    samples = Samples(capacity=2)
    for value in (0.05, 0.06, 5000.0):
        samples.add(value)
    assert sum(samples.buckets) == 3
    assert samples.buckets[0] == samples.buckets[1] == samples.buckets[len(BUCKETS_MS)] == 1
    assert samples.total_ms == pytest.approx(5000.11)


def test_splits_are_kept_by_sessions() -> None:
    timings = Timings()
    timings.add_split(1, 0.3)
    timings.add_split(8, 0.9)
    timings.add_split(8, 1.1)
    assert {count: len(samples) for count, samples in timings.split.items()} == {1: 1, 8: 2}


def test_names_beyond_a_bound_are_counted_together() -> None:
    """Clients name sources, and may make up as many names as they like."""
    counts = CountsByName()
    for number in range(1000):
        counts[f"source {number}"].offered += 1
    assert len(counts) == MOST_NAMES + 1
    assert counts["source 0"].offered == 1
    assert counts[OTHER].offered == 1000 - MOST_NAMES
    assert sum(each.offered for each in counts.values()) == 1000


def test_accepted_nodes_are_counted_by_place_and_far_places_together() -> None:
    counts, others = SourceCounts(), SourceCounts()
    for place in (0, 1, 1, LAST_PLACE, LAST_PLACE + 5):
        counts.accept(place)
    others.accept(1)
    assert counts.accepted == 5
    assert counts.accepted_at.tolist() == [1, 2, *[0] * (LAST_PLACE - 2), 2]
    assert counts.plus(others).accepted_at[1] == 3
