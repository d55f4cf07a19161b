"""What is counted by source name stays bounded, whatever clients call their sources."""

from verifier_service.engine.stats import MOST_NAMES, OTHER, CountsByName


def test_names_beyond_a_bound_are_counted_together() -> None:
    counts = CountsByName()
    for number in range(1000):
        counts[f"source {number}"].offered += 1
    assert len(counts) == MOST_NAMES + 1
    assert counts["source 0"].offered == 1
    assert counts[OTHER].offered == 1000 - MOST_NAMES
    assert sum(each.offered for each in counts.values()) == 1000
