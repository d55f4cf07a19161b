"""An engine core over the target with the proposers of some settings, timed by its thread's processor time.

Every core has a target of its own, because a head's planes belong to the target's pool.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from itertools import zip_longest
from typing import NamedTuple

from benchmarks.proposers.timed_proposer import LevelTimes, TimedProposer
from outrider.lm.outcome import OutcomeWants
from outrider.lm.runner import PackedLM
from outrider.lm.step_profile import profile_steps
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from speculative.stop import StopChecker
from verifier_service.engine.core import EngineCore, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Open
from verifier_service.engine.session import Session
from verifier_service.engine.source_policy import Reputations
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.loading import load_target
from verifier_service.proposers.batched import BatchedProposer, all_needs
from verifier_service.proposers.planning import plan_proposers
from verifier_service.sessions.request import SessionRequest, SourceSet
from verifier_service.settings import VerifierSettings


class DraftCounts(NamedTuple):
    """What streams drafted and delivered."""

    rounds: int
    """Rounds of all streams."""
    nodes: int
    """Drafted nodes that the target computed."""
    scouts: int
    """Scouts that the target computed."""
    accepted: dict[str, int]
    """Drafted tokens that were delivered, by source."""
    accepted_at: tuple[int, ...]
    """Drafted tokens that were delivered, by place in their round."""
    levels: tuple[LevelTimes, ...]
    """What the levels of all batched proposers took, by depth."""

    def since(self, then: "DraftCounts") -> "DraftCounts":
        """What was added to earlier counts."""
        places = zip_longest(self.accepted_at, then.accepted_at, fillvalue=0)
        levels = zip_longest(self.levels, then.levels, fillvalue=LevelTimes())
        return DraftCounts(
            self.rounds - then.rounds,
            self.nodes - then.nodes,
            self.scouts - then.scouts,
            {name: count - then.accepted.get(name, 0) for name, count in self.accepted.items()},
            tuple(now - before for now, before in places),
            tuple(now.less(before) for now, before in levels),
        )


class DecodedStreams(NamedTuple):
    """Time and counts of one run of streams that start together, from the last stream's first token on."""

    ids: tuple[tuple[int, ...], ...]
    """Generated tokens of each stream."""
    counted: tuple[int, ...]
    """Tokens of all streams that came after the last stream's first one; the other fields are of these."""
    seconds: float
    """Processor time."""
    drafting_s: float
    """Processor time of proposers: calls that draft, and calls that show them the passes' results."""
    counts: DraftCounts


class ThreadMeter:
    """Measures a step in processor time of this thread, and tells the cost model what steps take.

    Args:
        costs: learns what steps take; None: nothing does.
    """

    def __init__(self, costs: StepCostModel | None) -> None:
        self.drafting_s = 0.0
        """Processor time of all proposers so far."""
        self._costs = costs
        self._apart_s = 0.0
        """Processor time since the last forward that is no part of what a row or a session costs."""
        self._ended_s: float | None = None
        self._computed = (1, 0)
        """Sessions of the last forward, and drafted nodes and scouts."""

    def now_s(self) -> float:
        """The processor time of this thread, in seconds."""
        return time.thread_time()

    def awake_s(self) -> float:
        """The same: a thread that stands still uses no processor."""
        return time.thread_time()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measures the choice of tokens, which steps pay for: nothing is to be subtracted."""
        yield

    def taking_in(self) -> AbstractContextManager[None]:
        """Measures proposers that draft from a session's own tokens."""
        return self._drafting()

    def proposing(self) -> AbstractContextManager[None]:
        """Measures batched proposers."""
        return self._drafting()

    def waited_for_drafts(self, seconds: float) -> None:
        """Nothing waits here: all sources are inside the engine."""
        raise AssertionError("a step waited for drafts, and there is no remote source")

    def forward_done(self, computed: TargetPass, began_s: float) -> PassTimes:
        """A forward that began at `began_s` has ended now."""
        ended_s, sessions = self.now_s(), len(computed.parts)
        if self._costs is None:
            return PassTimes(began_s, ended_s)
        if self._ended_s is not None:
            between_s = began_s - self._ended_s - self._apart_s
            self._costs.record_overhead(1000 * max(0.0, between_s), *self._computed)
        self._costs.record(computed.rows, 1000 * (ended_s - began_s), sessions, computed.depth)
        self._ended_s, self._apart_s, self._computed = ended_s, 0.0, (sessions, computed.nodes)
        return PassTimes(began_s, ended_s)

    def pause(self) -> None:
        """The time until the next forward is no part of a step."""
        self._ended_s = None

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        began_s = self.now_s()
        yield
        spent_s = self.now_s() - began_s
        self.drafting_s += spent_s
        self._apart_s += spent_s


def _measured(target: PackedLM) -> StepCostModel:
    return StepCostModel.of(profile_steps(target))


class MeteredEngine:
    """Decodes streams with the sources of a method; what it learns about them stays, as in a worker.

    Args:
        settings: of a verifier; they name the batched proposers and heads.
        sources: names of the sources of every session.
        node_limit: the most drafted nodes of a session in a round.
        costs: what steps of the target take, which another engine has measured; None: it is measured now.
        proposers: batched proposers by source name; None: those that the settings name.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        sources: Sequence[str],
        node_limit: int,
        costs: StepCostModel | None = None,
        proposers: Mapping[str, BatchedProposer] | None = None,
    ) -> None:
        self._sources, self._node_limit = tuple(sources), node_limit
        if settings.passes != "compiled":  # nothing is compiled beside a measurement
            settings = settings.model_copy(update={"passes": "eager"})
        self._target = load_target(settings)
        if proposers is None:
            proposers = {name: plan.make(self._target) for name, plan in plan_proposers(settings).items()}
        self._timed = {name: TimedProposer(proposer) for name, proposer in proposers.items()}
        needs = all_needs(proposers.values())
        self._target.wants = OutcomeWants(needs.tops, needs.layers)
        if settings.passes == "compiled":
            self._target.compile_passes("compiled", settings.cache_dir)
        is_adaptive = settings.budget == "adaptive"
        # A fixed budget knows no costs: proposers then draft as deep as they can, and none rests.
        measured = costs or (_measured(self._target) if is_adaptive else StepCostModel())
        self.costs = deepcopy(measured)
        """What steps take: measured at first, then learnt from steps."""
        limits = EngineLimits(wait_ms_most=0.0, reuse_prefixes=False, adaptive=is_adaptive, lease_s=0.0)
        self._meter = ThreadMeter(self.costs if is_adaptive else None)
        cache = KVCache(self._target.pool, False, 0.0)
        self._core = EngineCore(cache, limits, self.costs, self._meter, self._timed)
        self._handles = 0
        self._reputations = Reputations()
        """What earlier streams taught about the sources."""

    @property
    def muted(self) -> dict[str, str]:
        """Why a proposer is no longer called, by source name."""
        return self._core.proposers.muted

    @property
    def target(self) -> PackedLM:
        """The target; its passes must not run while `decode` does."""
        return self._target

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values that a cached token takes."""
        return self._target.pool.layout.slot_bytes

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        params: SamplingParams,
        seed: int,
        reference: Sequence[int] = (),
    ) -> DecodedStreams:
        """Decodes all prompts at once, `tokens` tokens each; the seed of stream i is `seed` + i.

        `reference` is a text that all answers may copy from; empty: there is none.
        """
        core, meter = self._core, self._meter
        texts = (tuple(reference),) if reference else ()
        sessions = [
            self._session(prompt, tokens, params, seed + at, texts) for at, prompt in enumerate(prompts)
        ]
        meter.pause()
        for session in sessions:
            core.apply(Open(session), meter.now_s())
        starts = [len(prompt) for prompt in prompts]
        self._run(lambda: all(len(one.ids) > start for one, start in zip(sessions, starts, strict=True)))
        counted_from = [len(session.ids) for session in sessions]
        before = self._counts()
        began_s, drafted_s = meter.now_s(), meter.drafting_s
        self._run(lambda: not len(core.sessions))
        seconds = meter.now_s() - began_s
        return DecodedStreams(
            tuple(tuple(one.ids[start:]) for one, start in zip(sessions, starts, strict=True)),
            tuple(id_ for one, at in zip(sessions, counted_from, strict=True) for id_ in one.ids[at:]),
            seconds,
            meter.drafting_s - drafted_s,
            self._counts().since(before),
        )

    def _run(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            begun = self._core.begin(self._meter.now_s())
            if not isinstance(begun, TargetPass):
                continue
            began_s = self._meter.now_s()
            outcome = self._target.forward(begun.sequences)
            self._core.finish(begun, outcome, self._meter.forward_done(begun, began_s))
        self._core.collect()

    def _counts(self) -> DraftCounts:
        """Counts since the engine began."""
        counts, totals = self._core.counts, self._core.totals
        nodes = sum(source.admitted for source in counts.values())
        accepted = {name: source.accepted for name, source in counts.items()}
        places = zip(*(source.accepted_at.tolist() for source in counts.values()), strict=True)
        timed = zip_longest(*(proposer.levels for proposer in self._timed.values()), fillvalue=LevelTimes())
        levels = (LevelTimes(*map(sum, zip(*depth, strict=True))) for depth in timed)
        places_sum = tuple(map(sum, places))
        return DraftCounts(totals.rounds, nodes, totals.scouts, accepted, places_sum, tuple(levels))

    def _session(
        self,
        prompt: Sequence[int],
        tokens: int,
        params: SamplingParams,
        seed: int,
        references: tuple[tuple[int, ...], ...],
    ) -> Session:
        self._handles += 1
        ids = tuple(prompt)
        request = SessionRequest(
            key=SessionKey("bench", f"session-{self._handles}"),
            epoch=1,
            ids=ids,
            prompt_length=len(ids),
            limit=len(ids) + tokens,
            params=params,
            seed=seed,
            stops=(),
            time_left_s=None,
            node_limit=self._node_limit,
            sources=(),
            references=references,
        )
        checker = StopChecker(frozenset(), request.limit, (), None, ids, len(ids), 0)
        inside = frozenset(range(1, len(self._sources) + 1))
        sources = SourceSet(self._sources, inside, frozenset())
        width, known = self._target.vocabulary_size, self._reputations
        return Session(self._handles, request, checker, width, sources, reputations=known)
