"""Edits that an output has made to a text that it copies from, such as a new name.

Each applies again wherever the text has the same ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LONGEST = 8
"""The most ids of either side of an edit that is learnt."""
_MOST = 64
"""The most edits that are remembered; the oldest is forgotten."""


class Edit(NamedTuple):
    """Ids of the text, and the ids that the output has in their place."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class LearntEdits:
    """Edits by the first id of what they replace; of several edits with the same first id, the last."""

    __slots__ = ("_edits",)

    def __init__(self) -> None:
        self._edits: dict[int, Edit] = {}

    def __bool__(self) -> bool:
        return bool(self._edits)

    def learn(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Remembers that the output has `new` in place of `old`; either may be too long, or empty."""
        if not (0 < len(old) <= _LONGEST and 0 < len(new) <= _LONGEST):
            return
        self._edits.pop(old[0], None)
        if len(self._edits) == _MOST:
            del self._edits[next(iter(self._edits))]
        self._edits[old[0]] = Edit(tuple(old), tuple(new))

    def at(self, text: Sequence[int], place: int) -> Edit | None:
        """The edit that applies to the text at this index; None where none does."""
        edit = self._edits.get(text[place])
        applies = edit is not None and tuple(text[place : place + len(edit.old)]) == edit.old
        return edit if applies else None

    def forget(self, first: int) -> None:
        """Forgets the edit of parts that begin with this id."""
        self._edits.pop(first, None)
