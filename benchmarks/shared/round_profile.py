"""Where the verifier's time of a round goes, by its own counters before and after some requests."""

from collections.abc import Callable, Iterable

from benchmarks.shared.figures import TimedRun
from benchmarks.shared.services import UpServices

_PHASES = {"forward": "forward", "choosing": "sampling", "drafting": "proposing", "waiting": "waiting"}
"""Part of a round to phase of a step, as the metric `outrider_verifier_step_seconds` names it."""


def round_profile(services: UpServices, run_all: Callable[[], Iterable[TimedRun]]) -> dict[str, float]:
    """Milliseconds and rows of a mean step while `run_all` sends its requests, one after the other.

    Prompts are part of the figures: their passes are steps as well.
    """
    before = _counters(services)
    runs = list(run_all())
    spent = {name: value - before[name] for name, value in _counters(services).items()}
    steps = max(1.0, spent.pop("steps"))
    found = {"rows": spent.pop("rows") / steps}
    found |= {f"{part}_ms": 1000 * seconds / steps for part, seconds in spent.items()}
    wall_ms = 1000 * sum(run.seconds for run in runs) / steps
    found["elsewhere_ms"] = wall_ms - sum(value for name, value in found.items() if name != "rows")
    found["tokens"] = sum(len(run.ids) for run in runs) / steps
    return {name: round(value, 3) for name, value in found.items()}


def _counters(services: UpServices) -> dict[str, float]:
    read = services.metric_sum
    seconds = {
        part: read("verifier", "outrider_verifier_step_seconds_sum", phase=phase)
        for part, phase in _PHASES.items()
    }
    return {
        "steps": read("verifier", "outrider_verifier_steps_total"),
        "rows": read("verifier", "outrider_verifier_rows_total"),
        **seconds,
        "between": read("verifier", "outrider_verifier_step_split_seconds_sum"),
    }
