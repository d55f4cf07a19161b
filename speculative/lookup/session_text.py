"""A session's own text with its repeats, in one index that several proposers share."""

from collections.abc import Sequence

from speculative.lookup.suffix_automaton import SuffixAutomaton


class SessionText:
    """Takes the tokens of one session from each proposer that reads them, and keeps them once."""

    __slots__ = ("index",)

    def __init__(self) -> None:
        self.index = SuffixAutomaton()
        """The text so far."""

    def take(self, begin: int, tokens: Sequence[int]) -> int:
        """Adds the tokens of the positions from `begin` on, at most the text's length, that are new.

        Returns the position behind them.
        """
        for token in tokens[len(self.index) - begin :]:
            self.index.append(token)
        return begin + len(tokens)
