"""Metrics carry the role's prefix."""

from outrider.runtime.metrics import Metrics


def test_names_carry_the_role() -> None:
    metrics = Metrics("verifier")
    metrics.counter("stale_drafts", "Drafts dropped as stale", ["source"]).labels("drafter").inc(3)
    assert b'outrider_verifier_stale_drafts_total{source="drafter"} 3.0' in metrics.exposition()


def test_two_registries_in_one_process_do_not_collide() -> None:
    for _ in range(2):
        Metrics("verifier").gauge("sessions", "Sessions open").set(2)


def test_a_histogram_is_fine_enough_for_rounds_of_a_millisecond() -> None:
    metrics = Metrics("drafter")
    metrics.histogram("step_seconds", "Time of a step").observe(0.0015)
    text = metrics.exposition()
    assert b'outrider_drafter_step_seconds_bucket{le="0.001"} 0.0' in text
    assert b'outrider_drafter_step_seconds_bucket{le="0.002"} 1.0' in text


def test_the_process_itself_is_measured() -> None:
    assert b"process_resident_memory_bytes" in Metrics("drafter").exposition()
