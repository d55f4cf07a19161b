"""Puts a learning drafter together from its settings."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from drafter_service.drafters import Drafter, load
from drafter_service.learning.collector import Collector
from drafter_service.learning.learner import OUTCOMES, Learner, LearnPlan
from drafter_service.learning.owner import LearnOwner
from drafter_service.learning.passages import PassageBuffer
from drafter_service.learning.versions import BASE, WeightVersions
from drafter_service.learning.worker import LearningWorker
from drafter_service.settings import DrafterSettings
from outrider.lm.device.placement import find_device
from outrider.lm.load.weights_digest import weights_digest
from outrider.runtime.metrics import Metrics
from outrider.source.followed import SourceProfile
from outrider.source.worker import Publish
from speculative.errors import InvalidRequest, OutriderError

log = logging.getLogger(__name__)

TOPS = 8
"""The target's likeliest ids that a learning drafter asks for at each place."""


class LearningMetrics:
    """The metrics of lessons: their outcomes, their pauses, and the acceptance of the weights."""

    def __init__(self, metrics: Metrics) -> None:
        self._lessons = metrics.counter(
            "lessons", "Ends of lessons, by outcome; better and earlier_better swapped weights.", ("outcome",)
        )
        for outcome in OUTCOMES:
            self._lessons.labels(outcome)
        self._paused = metrics.counter("lessons_paused_seconds", "Time for which lessons were paused.")
        self._acceptance = metrics.gauge(
            "learning_acceptance",
            "Acceptance of the serving weights on the passages kept for scoring, teacher-forced.",
        )

    def ended(self, outcome: str) -> None:
        """Counts the end of one lesson."""
        self._lessons.labels(outcome).inc()

    def scored(self, version: int, acceptance: float) -> None:
        """Shows the acceptance of the version that serves."""
        self._acceptance.set(acceptance)

    def paused(self, seconds: float) -> None:
        """Counts the time for which a child was paused."""
        self._paused.inc(seconds)


def learning_of(settings: DrafterSettings, metrics: Metrics) -> "Learning | None":
    """What a drafter needs to learn; None: it learns from nobody. Raises InvalidRequest."""
    if settings.learn:
        return Learning(settings, metrics)
    for flag, given in (("--learn-dir", settings.learn_dir), ("--learn-from", settings.learn_from)):
        if given:
            raise InvalidRequest(
                f"{flag} is given without --learn, so nothing would be learnt: give --learn tenant:NAME or "
                f"--learn public, or drop {flag}"
            )
    return None


class Learning:
    """Everything that a drafter needs to learn: the folder of its weights, and the weights to begin with.

    Raises InvalidRequest for settings that cannot be kept.
    """

    def __init__(self, settings: DrafterSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._owner = LearnOwner.of(settings.learn, settings.learn_from)
        if settings.learn_dir is None:
            raise InvalidRequest("learn needs a folder for learnt weights: give --learn-dir")
        if settings.skip or settings.exit_layer:
            raise InvalidRequest("a part of a model cannot learn: drop --skip and --exit-layer, or --learn")
        if settings.drafter != "causal_lm":
            raise InvalidRequest(
                f"a drafter of kind {settings.drafter} cannot learn: drop --drafter, or --learn"
            )
        if find_device(settings.device).type != "cpu":
            raise InvalidRequest("a drafter learns on the CPU alone: give --device cpu, or drop --learn")
        self._versions = WeightVersions(
            settings.learn_dir, settings.model, self._owner.label, weights_digest(settings.model)
        )
        self._metrics = LearningMetrics(metrics)
        self._threads: int | None = None

    def load(self) -> Drafter:
        """The drafter with the weights that served last; with the given ones where those do not load."""
        version = self._versions.state.current
        try:
            drafter = load(self._of(self._versions.name_of(version)))
        except OutriderError as error:
            if version == BASE:
                raise
            log.warning("version %d of the weights does not load, the given ones serve: %s", version, error)
            self._versions.give_up()
            drafter = load(self._settings)
        self._threads = torch.get_num_threads()
        return drafter

    def worker(self, drafter: Drafter, profile: SourceProfile, publish: Publish) -> LearningWorker:
        """The worker of a loaded drafter, which learns from now on."""
        settings = self._settings
        buffer = PassageBuffer(settings.learn_buffer_mb * 2**20)
        plan = LearnPlan(
            settings.learn_every,
            settings.learn_steps,
            settings.learn_rate,
            settings.learn_memory_mb,
            settings.learn_cores,
            settings.learn_duty,
        )
        name = settings.model.rstrip("/").rpartition("/")[2]
        learner = Learner(plan, buffer, self._versions, self._again, name, self._metrics)
        version = self._versions.state.current
        worker = LearningWorker(
            drafter,
            replace(profile, model=learner.name_of(version), tops=TOPS, tenant=self._owner.tenant),
            publish,
            growth=settings.growth,
            nodes_per_pass=settings.nodes_per_pass,
            chunk=settings.prefill_chunk,
            policy=settings.policy,
            collector=Collector(self._owner, buffer, TOPS),
            ended=learner.stop,
            version=version,
        )
        learner.start(worker)
        return worker

    def _again(self, name: str) -> Drafter:
        """The drafter of another version, with the settings of the serving drafter; any thread."""
        # In a thread that ends, for the reason that `outrider.runtime.own_thread` gives.
        with ThreadPoolExecutor(1, "load-again") as executor:
            return executor.submit(load, self._of(name)).result()

    def _of(self, name: str) -> DrafterSettings:
        # A measurement of threads would disturb the passes of the drafter that serves.
        threads = self._settings.threads if self._threads is None else self._threads
        return self._settings.model_copy(update={"model": name, "threads": threads})
