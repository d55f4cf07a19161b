"""What the settings of a service say of its learning."""

from pathlib import Path

from outrider.learning.learner import LearnPlan
from outrider.model_settings import LearningSettings
from speculative.errors import InvalidRequest


def refuse_unused(settings: LearningSettings) -> None:
    """Raises InvalidRequest where settings of learning are given without `learn`.

    An empty `learn` that is given switches off what a file or a variable says, its settings included.
    """
    if settings.learn or "learn" in settings.model_fields_set:
        return
    given = sorted(name for name in settings.model_fields_set if name.startswith("learn_"))
    # An empty list or folder is given by those who pass unset variables on.
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given if getattr(settings, name))
    if flags:
        raise InvalidRequest(
            f"{flags} {'are' if ',' in flags else 'is'} given without --learn, so nothing would be learnt: "
            f"give --learn tenant:NAME or --learn public, or drop {flags}"
        )


def folder_of(settings: LearningSettings) -> Path:
    """The folder of learnt weights. Raises InvalidRequest where none is given."""
    if settings.learn_dir is None:
        raise InvalidRequest("learn needs a folder for learnt weights: give --learn-dir")
    return settings.learn_dir


def plan_of(settings: LearningSettings) -> LearnPlan:
    """How much is learnt at a time, and within which bounds."""
    return LearnPlan(
        settings.learn_every,
        settings.learn_steps,
        settings.learn_rate,
        settings.learn_memory_mb,
        settings.learn_cores,
        settings.learn_duty,
    )
