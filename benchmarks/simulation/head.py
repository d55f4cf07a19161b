"""A simulated head: a batched proposer inside the toy verifier, which is right at a given rate.

It checks what the engine shows it: no committed token is left out, none comes twice.
"""

import random
from collections.abc import Iterator, Sequence

from benchmarks.simulation.toy import VOCABULARY, hash_of, next_id
from speculative.hashing import extend
from verifier_service.proposers.batched import DraftAsk, DraftLevel, ProposedSession, ProposerNeeds, SeenPass

HEAD = "head"
"""Name of the source."""
RIGHT = 0.7
"""Share of drafted tokens that are the target's own."""
DEPTH = 3
"""Nodes of a drafted chain."""
SILENT = 0.1
"""Share of the asks that get no draft."""
TOPS = 2


class ToyHead:
    """A BatchedProposer that knows the toy target."""

    needs = ProposerNeeds(tops=TOPS)

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sessions: dict[int, ProposedSession] = {}
        self._shown: dict[int, int] = {}
        """Position up to which each session's committed tokens were shown."""

    def open(self, session: ProposedSession) -> None:
        """Takes a session in, from its latest token on."""
        self._sessions[session.handle] = session
        self._shown[session.handle] = len(session.ids)

    def close(self, handle: int) -> None:
        """Forgets the session."""
        self._sessions.pop(handle, None)
        self._shown.pop(handle, None)

    def saw(self, seen: SeenPass) -> None:
        """Checks that each round goes on where the one before it ended."""
        for seen_round in seen.rounds:
            session, tokens = self._sessions[seen_round.handle], seen_round.tokens
            end = seen_round.position + len(tokens)
            assert seen_round.position == self._shown[seen_round.handle], (
                "a head missed a round, or saw it twice"
            )
            assert tuple(session.ids[seen_round.position : end]) == tokens, "a head was shown other tokens"
            self._shown[seen_round.handle] = end

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows a chain for each session, level by level."""
        seeds = [self._sessions[ask.handle].seed for ask in asks]
        hashes = [hash_of(self._sessions[ask.handle].ids) for ask in asks]
        depths = [0 if self._chance.random() < SILENT else min(DEPTH, ask.node_limit) for ask in asks]
        for depth in range(DEPTH):
            levels: list[DraftLevel | None] = []
            for at, seed in enumerate(seeds):
                if depth >= depths[at]:
                    levels.append(None)
                    continue
                right = self._chance.random() < RIGHT
                token = next_id(hashes[at], seed) if right else self._chance.randrange(VOCABULARY)
                hashes[at] = extend(hashes[at], token)
                levels.append(DraftLevel((token,), (depth - 1,), (RIGHT ** (depth + 1),)))
            yield levels
