"""Sessions of a real target that a head drafts for, beside a proposer that knows the answer now and then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from core_driver import GREEDY, CoreDriver

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import GuestRoom, SlotPool
from outrider.lm.outcome import OutcomeWants
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from tests.lm.families import model_of
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
)

Ids = tuple[int, ...]
Tree = list[tuple[Ids, Ids]]
"""Tokens and parents of a draft, level by level."""
COMPARED_LEVELS = 3
"""Levels of a draft that do not depend on the processor. In deeper levels, products of probabilities come so
close together that the rounding of another kernel decides which node is among the best."""
Way = tuple[SamplingParams, int]
"""Parameters and seed of a request."""


def target_for(needs: ProposerNeeds, blocks: int = 256) -> PackedLM:
    """A tiny target with room for a head; its storage has to grow, and may be scarce."""
    layers = tuple(dict.fromkeys(needs.layers))
    guest = GuestRoom(needs.planes, len(layers)) if needs.planes else None
    lm = PackedLM(model_of("llama", max_position_embeddings=128), guest=guest)
    lm.pool = SlotPool(lm.pool.layout, max_slots=blocks * BLOCK, initial_slots=4 * BLOCK)
    lm.wants = OutcomeWants(needs.tops, layers)
    return lm


class Recorded:
    """A head's proposer whose drafts are written down, with the tokens that they follow."""

    def __init__(self, proposer: BatchedProposer) -> None:
        self.needs = proposer.needs
        self.drafts: list[tuple[Ids, Way, Tree]] = []
        self._proposer = proposer
        self._sessions: dict[int, ProposedSession] = {}

    def open(self, session: ProposedSession) -> None:
        self._sessions[session.handle] = session
        self._proposer.open(session)

    def close(self, handle: int) -> None:
        self._proposer.close(handle)

    def saw(self, seen: SeenPass) -> None:
        self._proposer.saw(seen)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        asked = [self._sessions[ask.handle] for ask in asks]
        ids = [tuple(session.ids) for session in asked]
        trees: list[list[tuple[Ids, Ids]]] = [[] for _ in asks]
        for levels in self._proposer.draft(asks):
            for session, known, tree, level in zip(asked, ids, trees, levels, strict=True):
                if level is not None:
                    if not tree:  # drafts that end before their first level are none
                        self.drafts.append((known, (session.params, session.seed), tree))
                    tree.append((level.tokens, level.parents))
            yield levels


class HalfTruth:
    """Drafts the right next tokens two times out of three, so that commits move rows."""

    needs = ProposerNeeds()

    def __init__(self, answers: Mapping[int, tuple[Ids, list[int]]]) -> None:
        self._answers = answers
        self._sessions: dict[int, ProposedSession] = {}

    def open(self, session: ProposedSession) -> None:
        self._sessions[session.handle] = session

    def close(self, handle: int) -> None:
        del self._sessions[handle]

    def saw(self, seen: SeenPass) -> None:
        pass

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        for depth in range(3):
            yield [self._level(ask.handle, depth) for ask in asks]

    def _level(self, handle: int, depth: int) -> DraftLevel | None:
        prompt, answer = self._answers[handle]
        first = len(self._sessions[handle].ids) - len(prompt)
        place = first + depth
        if place >= len(answer) or any(above % 3 == 2 for above in range(first, place + 1)):
            return None
        wrong = (answer[place] + 1) % 61
        above = -1 if depth == 0 else 2 * depth - 1
        return DraftLevel((wrong, answer[place]), (above, above), (0.4**depth, 0.4**depth))


class HeadDecoding:
    """Sessions that a head of `make` drafts for; `make` makes its proposer anew for a target.

    Their drafts are compared with those of fresh sessions, for which `fresh` makes the proposer, else `make`.
    """

    def __init__(
        self,
        make: Callable[[PackedLM], BatchedProposer],
        needs: ProposerNeeds,
        blocks: int = 256,
        fresh: Callable[[PackedLM], BatchedProposer] | None = None,
        **limits: Any,
    ) -> None:
        self._make, self._needs = fresh or make, needs
        target, self._bare = target_for(needs, blocks), target_for(needs)
        self.head = Recorded(make(target))
        self.answers: dict[int, tuple[Ids, list[int]]] = {}
        proposers = {"head": self.head, "truth": HalfTruth(self.answers)}
        self.driver = CoreDriver(target, proposers, **limits)
        self._plain = cache(self._decode)
        self._fresh = cache(self._draft)

    def open(
        self,
        prompt: Sequence[int],
        new: int = 24,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        sources: Sequence[str] = ("head", "truth"),
    ) -> Session:
        session = self.driver.open(prompt, new, params, seed, sources, node_limit=16)
        self.answers[session.handle] = tuple(prompt), self._plain(tuple(prompt), new, params, seed)
        return session

    def check(self, *sessions: Session) -> None:
        """Ids equal plain decoding's, and every draft of the head equals a fresh session's."""
        for session in sessions:
            assert self.driver.generated(session) == self.answers[session.handle][1]
        assert not self.driver.core.proposers.muted
        assert len(self.head.drafts) > len(sessions)
        for ids, way, tree in self.head.drafts:
            levels = min(len(tree), COMPARED_LEVELS)
            assert tree[:levels] == self._fresh(ids, way)[:levels], ids
        self.head.drafts.clear()

    def _decode(self, prompt: Ids, new: int, params: SamplingParams, seed: int) -> list[int]:
        driver = CoreDriver(self._bare, reuse_prefixes=False)
        session = driver.open(prompt, new, params, seed)
        driver.run()
        return driver.generated(session)

    def _draft(self, ids: Ids, way: Way) -> Tree:
        """The head's draft after `ids` in a session of its own, which reads them as its prompt.

        A head without planes knows hidden states only once the session decodes, so the last token is decoded.
        """
        head = Recorded(self._make(self._bare))
        driver = CoreDriver(self._bare, {"head": head}, reuse_prefixes=False, prefill_chunk=len(ids) - 1)
        prompt = ids if self._needs.planes else ids[:-1]
        session = driver.open(prompt, 100, *way, sources=("head",), node_limit=16)
        while not head.drafts:
            driver.step()
        driver.core.sessions.park(session)
        ((known, _, tree),) = head.drafts
        assert known == ids, "the target would have chosen another token"
        return tree
