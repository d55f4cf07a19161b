"""The engine's core, its passes computed by hand, over any target and batched proposers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngram_lm import NgramLM

from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from speculative.stop import StopChecker
from verifier_service.engine.core import EngineCore as Core
from verifier_service.engine.core import Idle, StepMeter, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Open, Update
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.sessions.request import SessionRequest, SourceSet

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8)
STEP_S = 0.02


class CoreDriver:
    """Opens sessions in a core and computes its passes, on a clock of its own."""

    def __init__(
        self,
        target: Any = None,
        proposers: Mapping[str, Any] | None = None,
        meter: StepMeter | None = None,
        costs: StepCostModel | None = None,
        **limits: Any,
    ) -> None:
        self.target = target or NgramLM(24)
        self.now = 100.0
        asked = EngineLimits(**{"wait_ms_most": 0.0, "adaptive": False, **limits})
        costs = costs or StepCostModel({1: 1000 * STEP_S, 64: 1100 * STEP_S})
        cache = KVCache(self.target.pool, asked.reuse_prefixes, asked.lease_s)
        self.core = Core(cache, asked, costs, meter, proposers or {})
        self.updates: list[Update] = []
        self.passes: list[TargetPass] = []
        self._handles = 0

    def open(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        new: int = 12,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        sources: Sequence[str] = (),
        node_limit: int = 8,
        remote: Sequence[str] = (),
        **others: Any,
    ) -> Session:
        """A session whose sources, inside the worker and behind them remote, have these names."""
        self._handles += 1
        limit = len(prompt) + new
        key, matcher = SessionKey(others.pop("tenant", ""), f"s{self._handles}"), others.pop("matcher", None)
        request = SessionRequest(
            key, 1, tuple(prompt), len(prompt), limit, params, seed, (), None, node_limit, (), **others
        )
        stop_checker = StopChecker(frozenset(), limit, (), None, prompt, len(prompt))
        first = len(sources) + 1
        named = SourceSet(
            (*sources, *remote), frozenset(range(1, first)), frozenset(range(first, first + len(remote)))
        )
        width = self.target.vocabulary_size
        session = Session(self._handles, request, stop_checker, width, named, grammar=matcher)
        self.core.apply(Open(session), self.now)
        return session

    def step(self, amid: Callable[[], None] = lambda: None) -> bool:
        """One pass, with `amid` called while it is computed; False where there was none to compute."""
        begun = self.core.begin(self.now)
        if begun.report is not None:
            self.updates += begun.report.updates
        if isinstance(begun, Idle):
            return False
        assert isinstance(begun, TargetPass)
        self.passes.append(begun)
        outcome = self.target.forward(begun.sequences)
        amid()
        began, self.now = self.now, self.now + STEP_S
        self.core.finish(begun, outcome, PassTimes(began, self.now))
        return True

    def run(self) -> None:
        """Passes until nothing is left to compute."""
        while self.step():
            pass
        self.core.kv.check()

    def generated(self, session: Session) -> list[int]:
        """The tokens that the session's updates have brought."""
        return [id_ for update in self.updates if update.handle == session.handle for id_ in update.ids]

    def finish_of(self, session: Session) -> Any:
        """How the session ended; None while it decodes."""
        ends = [update.finish for update in self.updates if update.handle == session.handle]
        return ends[-1] if ends else None
