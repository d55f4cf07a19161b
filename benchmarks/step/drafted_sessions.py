"""Sessions of a real engine core that get a draft tree of known size and acceptance before every step.

The sessions' tokens are decoded plainly first. A tree then follows them for two tokens, beside wrong
siblings. So every step verifies all nodes, accepts two and commits three tokens of each session.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.lm.runner import PackedLM
from outrider.wire.codec import SessionKey
from speculative.fragment import Fragment
from speculative.params import SamplingParams
from speculative.stop import StopChecker
from verifier_service.engine.core import EngineCore, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import InFlight, Offers, Open
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.sessions.request import SessionRequest, SourceSet

PROMPT_TOKENS = 32
NODES = 16
FOLLOWED = 2
"""Drafted tokens of a tree that the target accepts."""
_SOURCE = 1
_FREE = {1: 1.0, 8192: 1.0}
"""A cost model's profile in which rows cost nothing, so that every node is admitted."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one step, of this thread's processor time: other processes count little."""

    begin: float
    forward: float
    finish: float


class DraftedSessions:
    """Drives sessions of one core, step by step, in the calling thread."""

    def __init__(self, target: PackedLM, sessions: int, params: SamplingParams, tokens: int) -> None:
        self._target = target
        limits = EngineLimits(wait_ms_most=0.0, reuse_prefixes=False)
        self.core = EngineCore(KVCache(target.pool, False, 0.0), limits, StepCostModel(_FREE))
        self._sessions = {
            handle: session_of(handle, params, target.vocabulary_size, tokens)
            for handle in range(1, sessions + 1)
        }
        for session in self._sessions.values():
            self.core.apply(Open(session), time.perf_counter())

    @property
    def ids(self) -> dict[int, list[int]]:
        """All ids of each session so far, by handle."""
        return {handle: session.ids for handle, session in self._sessions.items()}

    def run(
        self, drafts_from: dict[int, list[int]] | None, stepped: Callable[[TargetPass, StepTimes], None]
    ) -> None:
        """Decodes until every session ends; trees follow the ids of `drafts_from`, if given, by handle."""
        clock = time.thread_time
        while len(self.core.sessions):
            if drafts_from is not None:
                self._draft(drafts_from)
            began = clock()
            begun = self.core.begin(time.perf_counter())
            if not isinstance(begun, TargetPass):
                continue
            if begun.report is not None:
                self.core.published(begun.report, time.perf_counter())
            computing = clock()
            outcome = self._target.forward(begun.sequences)
            computed = clock()
            self.core.finish(begun, outcome, PassTimes(computing, computed))
            ended = clock()
            stepped(
                begun,
                StepTimes((computing - began) * 1e3, (computed - computing) * 1e3, (ended - computed) * 1e3),
            )
        self.core.collect()

    def _draft(self, true_ids: dict[int, list[int]]) -> None:
        drafts = []
        for handle, session in self._sessions.items():
            at = len(session.ids)
            coming = true_ids[handle][at : at + FOLLOWED]
            if session.uncomputed == 1 and len(coming) == FOLLOWED and session in self.core.sessions:
                drafts.append((handle, _tree(session, coming, self._target.vocabulary_size)))
        if drafts:
            self.core.apply(Offers(tuple(drafts), time.perf_counter(), InFlight()), time.perf_counter())


def _tree(session: Session, coming: list[int], vocabulary: int) -> Fragment:
    """A tree of NODES nodes: the coming ids as a path, and wrong siblings below every node of the path."""
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    above = -1
    for depth, token in enumerate((*coming, None)):
        width = NODES // (FOLLOWED + 1) + (depth < NODES % (FOLLOWED + 1))
        wrong = [(coming[0] + 7 * (at + 1)) % vocabulary for at in range(width)]
        children = wrong if token is None else [token, *[id_ for id_ in wrong if id_ != token][: width - 1]]
        first = len(tokens)
        tokens += children
        parents += [above] * len(children)
        survival += [0.8 ** (depth + 1) if at == 0 else 0.1 / (depth + at) for at in range(len(children))]
        above = first
    return Fragment(
        _SOURCE, 1, len(session.ids), session.prefix_hash, tuple(tokens), tuple(parents), tuple(survival)
    )


def session_of(
    handle: int, params: SamplingParams, vocabulary: int, tokens: int, prompt: tuple[int, ...] = ()
) -> Session:
    """A session that generates so many tokens, and takes drafts of one source.

    Without a prompt of its own it gets one that differs from the other sessions' from the first id on.
    """
    ids = prompt or tuple(
        (handle * 31 + place * (handle % 97 + 3)) % vocabulary for place in range(PROMPT_TOKENS)
    )
    request = SessionRequest(
        key=SessionKey("bench", f"session-{handle}"),
        epoch=1,
        ids=ids,
        prompt_length=len(ids),
        limit=len(ids) + tokens,
        params=params,
        seed=handle,
        stops=(),
        time_left_s=None,
        node_limit=NODES,
        sources=(),
    )
    checker = StopChecker(frozenset(), request.limit, (), None, ids, len(ids), 0)
    return Session(
        handle, request, checker, vocabulary, SourceSet(("drafts",), frozenset(), frozenset({_SOURCE}))
    )
