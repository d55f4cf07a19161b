"""Puts a learning drafter together from its settings."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from drafter_service.drafters import Drafter, load
from drafter_service.learning.collector import Collector
from drafter_service.learning.worker import LearningWorker
from drafter_service.settings import DrafterSettings
from outrider.learning.from_settings import folder_of, plan_of, refuse_unused
from outrider.learning.learner import Learner
from outrider.learning.metrics import LearningMetrics
from outrider.learning.owner import LearnOwner
from outrider.learning.passages import PassageBuffer
from outrider.learning.versions import BASE, WeightVersions
from outrider.lm.device.placement import find_device
from outrider.lm.load.weights_digest import loaded_digest, weights_digest
from outrider.runtime.metrics import Metrics
from outrider.source.followed import SourceProfile
from outrider.source.worker import Publish
from speculative.errors import InvalidRequest, OutriderError

log = logging.getLogger(__name__)

TOPS = 8
"""The target's likeliest ids that a learning drafter asks for at each place."""
CHILD = "drafter_service.learning.child"
"""The module that a lesson's process runs."""


def learning_of(settings: DrafterSettings, metrics: Metrics) -> "Learning | None":
    """What a drafter needs to learn; None: it learns from nobody. Raises InvalidRequest."""
    if settings.learn:
        return Learning(settings, metrics)
    refuse_unused(settings)
    return None


class ServingDrafter:
    """A worker's drafter as a learner swaps it.

    Args:
        worker: drafts with it.
        load: loads the drafter of a folder or id as the first one was loaded; raises OutriderError.
        called: what a version is called, for people.
    """

    def __init__(
        self, worker: LearningWorker, load: Callable[[str], Drafter], called: Callable[[int], str]
    ) -> None:
        self._worker = worker
        self._load = load
        self._called = called

    @property
    def sessions(self) -> int:
        """Number of sessions that the drafter follows now."""
        return len(self._worker.roster)

    def load(self, name: str) -> Drafter:
        """The drafter of a folder or id. Raises OutriderError."""
        return self._load(name)

    def swap(self, loaded: Drafter, version: int) -> "Future[Drafter]":
        """Has a version draft from the next pass on."""

        def replace() -> Drafter:
            before = self._worker.replace(loaded, self._called(version))
            self._worker.version = version
            return before

        return self._worker.call(replace)

    def discard(self, loaded: Drafter) -> None:
        """Shuts a drafter down."""
        loaded.shut_down()


class Learning:
    """Everything that a drafter needs to learn: the folder of its weights, and the weights to begin with.

    Raises InvalidRequest for settings that cannot be kept.
    """

    def __init__(self, settings: DrafterSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._owner = LearnOwner.of(settings.learn, settings.learn_from)
        self._folder = folder_of(settings)
        if settings.skip or settings.exit_layer:
            raise InvalidRequest("a part of a model cannot learn: drop --skip and --exit-layer, or --learn")
        if settings.drafter != "causal_lm":
            raise InvalidRequest(
                f"a drafter of kind {settings.drafter} cannot learn: drop --drafter, or --learn"
            )
        if find_device(settings.device).type != "cpu":
            raise InvalidRequest("a drafter learns on the CPU alone: give --device cpu, or drop --learn")
        self._metrics = LearningMetrics(metrics)
        self._versions: WeightVersions | None = None
        """Weights in the folder; None until the given weights are at hand, which tell whose folder it is."""
        self._threads: int | None = None

    def load(self) -> Drafter:
        """The drafter with the weights that served last; with the given ones where those do not load.

        Raises OutriderError where the given weights do not load or cannot be told from others, and where the
        folder is in use or holds weights learnt from others.
        """
        settings = self._settings
        # An id that is not in the cache has no digest before it is loaded.
        given = None if weights_digest(settings.model) else load(settings)
        digest = loaded_digest("model", settings.model)
        self._versions = WeightVersions(self._folder, settings.model, self._owner.label, digest)
        drafter = self._learnt(self._versions)
        if drafter is not None and given is not None:
            given.shut_down()
        drafter = drafter or given or load(settings)
        self._threads = torch.get_num_threads()
        return drafter

    def _learnt(self, versions: WeightVersions) -> Drafter | None:
        """The drafter with the learnt weights that served last; None where the given ones serve."""
        if (version := versions.state.current) == BASE:
            return None
        try:
            return load(self._of(versions.name_of(version)))
        except OutriderError as error:
            log.warning("version %d of the weights does not load, the given ones serve: %s", version, error)
            versions.give_up()
            return None

    def worker(self, drafter: Drafter, profile: SourceProfile, publish: Publish) -> LearningWorker:
        """The worker of a loaded drafter, which learns from now on."""
        settings, versions = self._settings, self._versions
        assert versions is not None, "the drafter is loaded before it learns"
        buffer = PassageBuffer(settings.learn_buffer_mb * 2**20)
        learner = Learner[Drafter](plan_of(settings), buffer, versions, CHILD, self._metrics)
        version = versions.state.current
        worker = LearningWorker(
            drafter,
            replace(profile, model=self._called(version), tops=TOPS, tenant=self._owner.tenant, learns=True),
            publish,
            growth=settings.growth,
            nodes_per_pass=settings.nodes_per_pass,
            chunk=settings.prefill_chunk,
            policy=settings.policy,
            collector=Collector(self._owner, buffer, TOPS),
            ended=learner.stop,
            version=version,
        )
        learner.start(ServingDrafter(worker, self._again, self._called))
        return worker

    def _called(self, version: int) -> str:
        """What a version is called, for people."""
        name = self._settings.model.rstrip("/").rpartition("/")[2]
        return name if version == BASE else f"{name} (learnt {version})"

    def _again(self, name: str) -> Drafter:
        """The drafter of another version, with the settings of the serving drafter; any thread."""
        # In a thread that ends, for the reason that `outrider.runtime.own_thread` gives.
        with ThreadPoolExecutor(1, "load-again") as executor:
            return executor.submit(load, self._of(name)).result()

    def _of(self, name: str) -> DrafterSettings:
        # A measurement of threads would disturb the passes of the drafter that serves.
        threads = self._settings.threads if self._threads is None else self._threads
        return self._settings.model_copy(update={"model": name, "threads": threads})
