"""How often a source outside this worker is told what was committed, which is what it drafts from.

A source none of whose drafts was accepted for a while rests: it is told nothing for a number of rounds, which
doubles each time that telling it again brought nothing. Sessions to come begin with what the last ones found,
so a source that is slow, silent or wrong costs a service next to nothing, and one that gets better is found
out. Pure: counts rounds and tokens.
"""

from dataclasses import dataclass

_FIRST_ROUNDS = 32
"""Rounds in which it was heard and nothing of it was accepted, until a source rests."""
_PROBE_ROUNDS = 8
_FIRST_REST = 16
_MOST_REST = 1024


@dataclass(slots=True)
class Record:
    """What the sessions so far found about a source."""

    rest: int = 0
    """Rounds for which it rested last; 0: it is worth asking."""


class Asking:
    """Whether one source is told of a session's rounds.

    Args:
        record: of the source; kept up to date.
    """

    __slots__ = ("_left", "_record", "_rest", "asked")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = record.rest
        self.asked = not record.rest
        """Whether it is told of the round that was committed last."""
        self._left = record.rest or _FIRST_ROUNDS

    def committed(self, accepted: int, heard: bool = True) -> None:
        """A round was committed, of which so many tokens were this source's; `heard`: it had sent drafts.

        One that is silent costs nothing, and may have a long prompt to read.
        """
        if accepted:
            self.asked, self._left, self._rest = True, _FIRST_ROUNDS, 0
            self._record.rest = 0
            return
        self._left -= heard or not self.asked
        if self._left > 0:
            return
        self.asked = not self.asked
        if self.asked:
            self._left = _PROBE_ROUNDS
        else:
            self._rest = min(2 * self._rest or _FIRST_REST, _MOST_REST)
            self._left = self._record.rest = self._rest
