"""The batched proposers of a verifier: those that its settings name, small model and heads included."""

from collections.abc import Iterable
from pathlib import Path

from outrider.learning.owner import LearnOwner
from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.published import head_class
from speculative.errors import InvalidRequest
from speculative.implementations import load_implementation
from verifier_service.proposers import BATCHED_PROPOSERS, LEAF_PROPOSERS, PROPOSERS
from verifier_service.proposers.batched import ProposerConfig, ProposerPlan
from verifier_service.settings import VerifierSettings, named_head

HEAD_PROPOSERS = {
    "medusa": "verifier_service.proposers.heads.medusa:plan",
    "hydra": "verifier_service.proposers.heads.hydra:plan",
    "pass": "verifier_service.proposers.heads.look_ahead:plan",
    "eagle3": "verifier_service.proposers.heads.eagle:plan",
    "mtp": "verifier_service.proposers.heads.eagle:plan",
    "eagle": "verifier_service.proposers.heads.eagle:plan",
}
"""Kind of head to "module:function" that makes a ProposerPlan of a ProposerConfig."""

SMALL_MODEL = {"small-model": "verifier_service.proposers.small_model:plan"}
"""The small model's source name to "module:function" that makes a ProposerPlan of a ProposerConfig."""

ADVICE = "give a folder or an id: only `outrider up` knows eagle and medusa, of the embedded target, and auto"


def plan_proposers(settings: VerifierSettings) -> dict[str, ProposerPlan]:
    """The plans of the batched proposers that the settings ask for, by source name.

    Reads the configuration of each head, not its weights. Raises OutriderError for a head that is missing or
    does not fit the target, and for two sources with one name.
    """
    plans: dict[str, ProposerPlan] = {}
    for table, config in _configured(settings):
        if config.name in plans or config.name in {*PROPOSERS, *LEAF_PROPOSERS}:
            raise InvalidRequest(
                f"two sources are called {config.name!r}; rename the head: NAME={config.checkpoint}"
            )
        plans[config.name] = load_implementation(*table)(config)
    return plans


def _configured(settings: VerifierSettings) -> Iterable[tuple[tuple[dict[str, str], str], ProposerConfig]]:
    """Each proposer's configuration, with the table that lists the proposer and its name in the table."""
    model, ranks = settings.model, settings.ranks
    for name in settings.proposers:
        if name in LEAF_PROPOSERS:
            continue  # each session has its own
        yield (BATCHED_PROPOSERS, name), ProposerConfig(name, model, ranks=ranks)
    if settings.small_model:
        yield (
            (SMALL_MODEL, "small-model"),
            ProposerConfig(
                "small-model", model, settings.small_model, ranks, settings.passes, settings.cache_dir
            ),
        )
    for text in settings.heads:
        name, checkpoint = named_head(text)
        kind = head_kind(checkpoint)
        tenant = LearnOwner.of(settings.learn, settings.learn_from).tenant if settings.learn else ""
        yield (
            (HEAD_PROPOSERS, kind),
            ProposerConfig(
                name or kind, model, checkpoint, ranks, settings.passes, settings.cache_dir, tenant
            ),
        )


def head_kind(checkpoint: str) -> str:
    """The kind of a head. Raises InvalidRequest, naming the flag, for what is no head."""
    try:
        return head_class(HeadConfig.read(checkpoint)).kind
    except InvalidRequest as error:
        advice = "" if Path(checkpoint).expanduser().is_dir() else f"; {ADVICE}"
        raise InvalidRequest(f"--heads {checkpoint}: {error}{advice}") from error
