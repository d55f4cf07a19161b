"""Puts a learning head together from the verifier's settings, and has the engine swap its weights."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from outrider.learning.from_settings import folder_of, plan_of, refuse_unused
from outrider.learning.learner import Learner
from outrider.learning.metrics import LearningMetrics
from outrider.learning.owner import LearnOwner
from outrider.learning.passages import PassageBuffer
from outrider.learning.versions import BASE, WeightVersions
from outrider.lm.device.placement import find_device
from outrider.lm.load.weights_digest import loaded_digest
from outrider.lm.runner import PackedLM
from outrider.runtime.metrics import Metrics
from speculative.errors import InvalidRequest, OutriderError
from verifier_service.engine.messages import Command, SwapProposer
from verifier_service.learning.collector import TextCollector
from verifier_service.proposers.batched import BatchedProposer
from verifier_service.proposers.planning import head_kind, plan_proposers
from verifier_service.settings import VerifierSettings, named_head

log = logging.getLogger(__name__)

CHILD = "verifier_service.learning.child"
"""The module that a lesson's process runs."""
LEARNING_KINDS = ("medusa", "hydra", "eagle", "eagle3", "mtp")
"""Kinds of heads that can learn."""


class HeadLearningMetrics(LearningMetrics):
    """The metrics of lessons, of the text that they are given, and of the weights that serve."""

    def __init__(
        self, metrics: Metrics, nbytes: Callable[[], int] = int, version: Callable[[], int] = int
    ) -> None:
        super().__init__(metrics)
        held = metrics.gauge(
            "learning_bytes", "Bytes of sessions' text that are kept to learn from and to score with."
        )
        held.set_function(nbytes)
        serving = metrics.gauge(
            "weights_version", "Version of the weights that a head learnt; 0: the weights it was given."
        )
        serving.set_function(version)


class ServingHead:
    """The engine's head as a learner swaps it.

    Args:
        name: the head's source name.
        load: makes the proposer of a folder or id; raises OutriderError.
        put: hands a command to the engine.
        running: number of sessions that the engine has.
        serves: told the version that drafts from now on; may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[str], BatchedProposer],
        put: Callable[[Command], None],
        running: Callable[[], int],
        serves: Callable[[int], None],
    ) -> None:
        self._name = name
        self._load = load
        self._put = put
        self._running = running
        self._serves = serves

    @property
    def sessions(self) -> int:
        """Number of sessions that the engine has."""
        return self._running()

    def load(self, name: str) -> BatchedProposer:
        """The proposer of a folder or id. Raises OutriderError."""
        return self._load(name)

    def swap(self, loaded: BatchedProposer, version: int) -> "Future[BatchedProposer]":
        """Has a version draft from the next pass on."""

        def swapped(before: "Future[BatchedProposer]") -> None:
            if not before.cancelled() and before.exception() is None:
                self._serves(version)

        swap = SwapProposer(self._name, loaded, Future())
        swap.before.add_done_callback(swapped)
        self._put(swap)
        return swap.before

    def discard(self, loaded: BatchedProposer) -> None:
        """Nothing: weights go with the last reference to them."""


def learning_of(settings: VerifierSettings, metrics: Metrics) -> "HeadLearning | None":
    """What a head needs to learn; None: it learns from nobody. Raises OutriderError."""
    if settings.learn:
        return HeadLearning(settings, metrics)
    refuse_unused(settings)
    return None


class HeadLearning:
    """Everything that a head needs to learn: the folder of its weights, and the weights to begin with.

    Raises InvalidRequest for settings that cannot be kept.
    """

    def __init__(self, settings: VerifierSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._owner = owner = LearnOwner.of(settings.learn, settings.learn_from)
        self._folder = folder_of(settings)
        if find_device(settings.device).type != "cpu":
            raise InvalidRequest(
                "a head learns beside a target on the CPU alone: give --device cpu, or drop --learn"
            )
        (text,) = settings.heads
        named, self._checkpoint = named_head(text)
        kind = head_kind(self._checkpoint)
        self._name = named or kind
        self._needs = plan_proposers(settings)[self._name].needs
        if kind not in LEARNING_KINDS or (kind == "hydra" and self._needs.planes):
            raise InvalidRequest(
                f"--heads {text}: {'a head with a prefix layer' if kind == 'hydra' else f'a {kind} head'} "
                f"cannot learn from traffic; give a head of another kind ({', '.join(LEARNING_KINDS)}), or "
                "drop --learn"
            )
        self._buffer = PassageBuffer(settings.learn_buffer_mb * 2**20)
        self.collector = TextCollector(owner, self._buffer)
        """Takes the sessions that have stopped decoding."""
        self.private: Mapping[str, str] = {self._name: owner.tenant} if owner.tenant else {}
        """The only tenant that the head drafts for, by the head's source name; empty: any tenant."""
        self._serving = BASE
        self._metrics = HeadLearningMetrics(metrics, lambda: self._buffer.nbytes, lambda: self._serving)
        self._learner: Learner[BatchedProposer] | None = None

    def make_head(self, target: PackedLM) -> dict[str, BatchedProposer]:
        """The proposer with the weights that served last, by its name; with the given ones if these fail.

        Call it when the target is loaded: only then are all files there that tell which weights were given.

        Raises OutriderError where the given weights do not load or cannot be told from others, and where the
        folder is in use or holds weights learnt from others.
        """
        versions = self._open()
        if (version := versions.state.current) != BASE:
            try:
                head = self._made(target, versions.name_of(version))
            except OutriderError as error:
                log.warning("version %d of the head does not load, the given one serves: %s", version, error)
                versions.give_up()
            else:
                self._serves(version)
                return {self._name: head}
        return {self._name: self._made(target, versions.name_of(BASE))}

    def start(self, target: PackedLM, put: Callable[[Command], None], running: Callable[[], int]) -> None:
        """Starts to learn; `put` hands a command to the engine, `running` is the number of its sessions."""

        def again(name: str) -> BatchedProposer:
            # In a thread that ends, for the reason that `outrider.runtime.own_thread` gives.
            with ThreadPoolExecutor(1, "load-again") as executor:
                return executor.submit(self._made, target, name).result()

        assert self._learner is not None, "the head is made before it learns"
        self._learner.start(ServingHead(self._name, again, put, running, self._serves))

    def end_soon(self) -> None:
        """Has the lesson in hand end; returns at once."""
        if self._learner is not None:
            self._learner.end_soon()

    def stop(self, within_s: float) -> None:
        """Ends the lesson in hand, and lets another process use the folder. Blocks for `within_s` at most.

        What takes longer goes on, and keeps the folder until it ends.
        """
        if self._learner is not None:
            self._learner.stop(within_s)

    def _open(self) -> WeightVersions:
        """Opens the folder of learnt weights, and makes the learner, which closes the folder."""
        settings = self._settings
        digests = f"{loaded_digest('heads', self._checkpoint)} {loaded_digest('model', settings.model)}"
        base = hashlib.sha256(digests.encode()).hexdigest()
        versions = WeightVersions(self._folder, self._checkpoint, self._owner.label, base)
        self._learner = Learner[BatchedProposer](
            plan_of(settings), self._buffer, versions, CHILD, self._metrics, settings.model
        )
        return versions

    def _serves(self, version: int) -> None:
        self._serving = version

    def _made(self, target: PackedLM, checkpoint: str) -> BatchedProposer:
        settings = self._settings.model_copy(update={"heads": (f"{self._name}={checkpoint}",)})
        plan = plan_proposers(settings)[self._name]
        if plan.needs != self._needs:
            raise InvalidRequest(f"head {checkpoint!r} needs other layers or planes than the given head")
        return plan.make(target)
