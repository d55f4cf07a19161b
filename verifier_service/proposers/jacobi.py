"""Jacobi decoding: the target's tokens behind wrong guesses become the next guesses (arXiv 2305.10427).

Each session keeps guesses for its next places. A pass computes them as a chain below the last committed
token. What the target says at every row of the chain, behind the first wrong guess as well, is the next guess
for the place after. Noise depends on the position alone, so the guesses converge at any temperature.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import mul

from speculative.hashing import extend
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    ScoutAsk,
    SeenRound,
)
from verifier_service.proposers.hit_rates import HitRates
from verifier_service.proposers.scouting import CommittedHash, Learnt, ScoutingProposer, said_after

_FIRST_RATE, _FIRST_WORTH = 0.3, 0.1
_LEAST_SURVIVAL = 0.03


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a JacobiProposer, which needs only the target's tokens."""
    return ProposerPlan(JacobiProposer.needs, lambda target: JacobiProposer())


class _Guessing:
    """The guesses of one session."""

    def __init__(self, session: ProposedSession, places: int) -> None:
        self._ids = session.ids
        self._hash = CommittedHash(session.ids)
        self._places = places
        self._base = len(session.ids)
        self.guesses = [session.ids[-1]] * places
        """Guesses for the places from the last committed token on."""

    def update(self, shown: SeenRound) -> tuple[int, int, bool]:
        """Moves the guesses on by a round.

        Returns the number of computed guesses, the number of right guesses, and whether the target checked
        and refuted the next guess.
        """
        base, count = shown.position, len(shown.tokens)
        prefix = self._hash.at(base)
        old = self.guesses if base == self._base else []
        said = said_after(prefix, shown)
        computed = 0
        follow: list[int | None] = [shown.tokens[0]]
        for place, guess in enumerate(old, 1):
            prefix = extend(prefix, guess)
            token = said.get(prefix)
            computed += token is not None
            follow.append(token if token is not None else old[place] if place < len(old) else None)
        right = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, shown.tokens, strict=False))
        )
        guesses = [token for token in follow[count:] if token is not None][: self._places]
        last = guesses[-1] if guesses else shown.tokens[-1]
        self.guesses = guesses + [last] * (self._places - len(guesses))
        self._base = base + count
        return computed, right, right < min(count, len(old))


class JacobiProposer(ScoutingProposer[_Guessing]):
    """A BatchedProposer that needs neither a model nor a text.

    Args:
        places: number of places for which each session keeps guesses.
    """

    needs = ProposerNeeds(tops=1)

    def __init__(self, places: int = 8) -> None:
        super().__init__(_FIRST_WORTH)
        self._places = places
        self._rates = HitRates([_FIRST_RATE] * places)

    def begin(self, session: ProposedSession) -> _Guessing:
        """Begins with the session's last token as the guess for every place."""
        return _Guessing(session, self._places)

    def learn(self, guesses: _Guessing, shown: SeenRound) -> Learnt:
        """Takes the target's tokens at the chain's rows as the next guesses."""
        computed, right, missed = guesses.update(shown)
        for depth in range(min(right, self._places)):
            self._rates.learn(depth, hit=True)
        if missed:
            self._rates.learn(right, hit=False)
        return Learnt(computed, right)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """One level: the likely guesses as a chain, and all guesses as scouts."""
        survivals = accumulate((self._rates[depth] for depth in range(self._places)), mul)
        likely = tuple(takewhile(lambda survival: survival >= _LEAST_SURVIVAL, survivals))
        yield [self._level(ask, likely) for ask in asks]

    def _level(self, ask: DraftAsk, survivals: tuple[float, ...]) -> DraftLevel:
        guesses = tuple(self.sessions[ask.handle].guesses[: ask.node_limit])
        parents = tuple(range(-1, len(guesses) - 1))
        scouts = ScoutAsk(guesses, parents, (self.worth.each,) * len(guesses)) if guesses else None
        count = min(len(survivals), len(guesses))
        return DraftLevel(guesses[:count], parents[:count], survivals[:count], scouts)
