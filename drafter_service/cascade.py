"""A cheap source that drafts for the drafter: what followed the session's last tokens earlier in its text.

The chain that it finds below a leaf is computed in the pass that expands the leaf, each token as if it were a
node already. Tokens that the drafter itself draws as children keep their rows, and their children are known a
pass or several earlier; the rest is dropped. So the tree is the drafter's own, whatever was guessed (staged
speculative decoding, arXiv 2308.04623; CS Drafting, arXiv 2312.11462). Pure; knows nothing of models.
"""

from collections.abc import Iterable, Sequence

from speculative.lookup.suffix_automaton import SuffixAutomaton

_LEAST_MATCH = 3
"""Tokens that must have occurred before, for what followed them to be guessed."""
_AHEAD = 64
"""Most tokens that are copied below the last committed token."""
_WEIGHT = 0.05
"""Weight of one guessed token in the running mean."""
_LEAST_RATE = 0.25
"""Part of the guessed tokens that must be drawn, for guesses to be worth their rows."""
_TRIES = 16
"""While guesses are not worth their rows, one guess in this many is made nonetheless."""


class CheapChain:
    """Guesses chains of tokens below the nodes of a draft tree.

    Args:
        ids: committed tokens.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self._text = SuffixAutomaton(ids)
        self._copied: tuple[int, ...] | None = None
        self._rate = 0.5
        self._declined = 0

    def commit(self, ids: Iterable[int]) -> None:
        """Adds committed tokens."""
        for token in ids:
            self._text.append(token)
        self._copied = None

    def below(self, path: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens below a drafted path from the last committed token; empty: nothing is known."""
        if most <= 0 or self._text.match_length < _LEAST_MATCH:
            return ()
        if self._copied is None:
            self._copied = self._text.draft(_AHEAD).tokens
        if self._copied[: len(path)] != tuple(path) or not self._pays():
            return ()
        return self._copied[len(path) : len(path) + most]

    def learn(self, guessed: int, drawn: int) -> None:
        """Learns how many of the guessed tokens, from the first on, the drafter drew as children."""
        for place in range(min(guessed, drawn + 1)):
            self._rate += _WEIGHT * ((place < drawn) - self._rate)

    def _pays(self) -> bool:
        if self._rate >= _LEAST_RATE:
            return True
        self._declined = (self._declined + 1) % _TRIES
        return self._declined == 0
