"""How often a source outside this worker is told what was committed, which is what it drafts from.

A source none of whose drafts was accepted for a while rests: no session tells it anything for a number of
steps, then one does for a few, and the number doubles each time that nothing comes of it. All is counted over
all sessions, so short ones find out together what no one of them could. A source that is slow or wrong costs
a service next to nothing, and one that gets better is found out. Pure: counts rounds and tokens.
"""

from dataclasses import dataclass

_FIRST_ROUNDS = 32.0
"""Rounds without an accepted token until a source rests."""
_PROBE_ROUNDS = 8.0
_FIRST_REST = 16
_MOST_REST = 256
_SPARED_REST = 64
"""The longest rest of one whose drafts were not tried. It is over, too, when the batch has shrunk to half:
they may be worth it then."""
_SPARED = 8.0
"""What one counts in which there were drafts and none was admitted: in a batch like this they are no use."""


@dataclass(slots=True)
class Record:
    """What the sessions so far found about a source."""

    rest: int = 0
    """Steps for which it rests; 0: it is worth asking."""
    left: int = 0
    """Of those, steps until a session tries it again."""
    step: int = 0
    """The last one that was counted."""
    barren: float = 0.0
    """Rounds since a token of it was accepted."""
    tried: float = 0.0
    """Of those, rounds of sessions that have tried it since its last rest began."""
    crowd: int = 0
    """Sessions in the step that had no use for it; 0: it rests for what it brought."""
    late: bool = False
    """Whether there were drafts for a session that has ended. Set by whoever reads what the source sends."""


class Asking:
    """Whether one source is told of a session's rounds.

    Args:
        record: of the source; kept up to date.
    """

    __slots__ = ("_begins", "_follows", "_left", "_probed", "_record", "asked")

    def __init__(self, record: Record) -> None:
        self._record = record
        self.asked = not record.rest
        """Whether it is told of the round that was committed last."""
        # Each has some rounds to find out for itself, but where all are too short for that.
        fewest = min(_PROBE_ROUNDS, 2 * _FIRST_ROUNDS - record.barren)
        self._left = max(1.0, fewest, _FIRST_ROUNDS - record.barren)
        self._probed = 0
        """The rest before the one that this session has ended."""
        self._follows = not self.asked
        """Whether it rests for what other sessions found."""
        self._begins = True
        """Whether this is the session's first round."""

    def committed(
        self, accepted: int, heard: bool = True, spared: bool = False, batch: int = 1, step: int = 0
    ) -> None:
        """A round was committed, of which so many tokens were this source's.

        `heard`: it had sent drafts. A silent one may have a long prompt to read, or nothing to say yet.
        `spared`: there were drafts of some source, and none was admitted to the step. `batch`: it was of so
        many sessions. `step`: its number; 0: it is one of its own.
        """
        record = self._record
        if accepted:
            self.asked, self._left, self._probed = True, _FIRST_ROUNDS, 0
            record.rest, record.barren, record.tried, record.late = 0, 0.0, 0.0, False
        elif not self.asked:
            self._go_on_resting(batch, step)
        else:
            # Where sessions are shorter than it is slow, what is late is all that is ever heard of it.
            spent = _SPARED if spared and heard else float(heard or record.late)
            record.late = False
            self._left -= spent
            record.barren += spent
            if self._probed:
                record.tried += spent
            if self._left <= 0:
                self._rest(_SPARED_REST if spared else _MOST_REST)
                self._follows = spared
                record.crowd = batch if spared else 0
        self._begins = False

    def _rest(self, most: int) -> None:
        rest = min(2 * self._probed or _FIRST_REST, most)
        self._record.rest = max(self._record.rest, rest) if not self._probed else rest
        self._record.left = self._record.rest
        self._record.tried = 0.0
        self._left = rest
        self.asked = False

    def _go_on_resting(self, batch: int, step: int) -> None:
        record = self._record
        self._left -= 1
        if not step or step != record.step:
            record.step = step
            record.left -= 1
        # Where other sessions do well with it, this one's own finding counts.
        # One that begins may be about to: of the older ones most are about to end, and find out nothing.
        soon = _PROBE_ROUNDS if self._begins else 0.0
        due = record.left <= soon if record.rest else self._follows or self._left <= 0
        if due or 2 * batch <= record.crowd:
            self.asked, self._follows = True, False
            record.crowd = 0
            self._left, self._probed = max(1.0, _PROBE_ROUNDS - record.tried), record.rest
            record.left = record.rest
