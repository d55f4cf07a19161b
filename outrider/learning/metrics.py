"""The metrics of lessons: their outcomes, their pauses, and the acceptance of the weights."""

from outrider.learning.learner import OUTCOMES
from outrider.runtime.metrics import Metrics


class LearningMetrics:
    """Counts lessons in the metrics of a service."""

    def __init__(self, metrics: Metrics) -> None:
        self._lessons = metrics.counter(
            "lessons", "Ends of lessons, by outcome; better and earlier_better swapped weights.", ("outcome",)
        )
        for outcome in OUTCOMES:
            self._lessons.labels(outcome)
        self._paused = metrics.counter("lessons_paused_seconds", "Time for which lessons were paused.")
        self._acceptance = metrics.gauge(
            "learning_acceptance",
            "Accepted places per place of the serving weights on the passages kept for scoring, "
            "teacher-forced.",
        )

    def ended(self, outcome: str) -> None:
        """Counts the end of one lesson."""
        self._lessons.labels(outcome).inc()

    def scored(self, acceptance: float) -> None:
        """Shows the acceptance of the version that serves."""
        self._acceptance.set(acceptance)

    def paused(self, seconds: float) -> None:
        """Counts the time for which a child was paused."""
        self._paused.inc(seconds)
