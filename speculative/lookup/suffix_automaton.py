"""The longest suffix that occurred before, and what followed it (SAM-Decoding, Hu et al., arXiv 2411.10666).

A suffix automaton (Blumer et al., 1985) over one session's ids, built id by id. The suffix link of the whole
text's state is the longest suffix with an earlier occurrence, so the append already finds the match. Knows
nothing of prompts, outputs or other sessions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROOT = 0
_NONE = -1
_REFRESHED = 4
"""Number of suffixes whose latest occurrence each append updates; shorter suffixes may name an older one."""
_MOST_LINKS = 64
"""Suffixes, ever shorter, that are tried below a path. A run of one token has as many as it has tokens."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A draft copied from a text: a chain of tokens."""

    tokens: tuple[int, ...]
    """Copied token ids, in order."""
    match_length: int
    """Number of tokens at the text's end that also stand before the place copied from."""


class SuffixAutomaton:
    """An append-only text that finds its own repeats; one to two microseconds and about 450 bytes per id."""

    __slots__ = ("_first", "_last", "_latest", "_lengths", "_links", "_match_end", "_next", "_text")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # One entry per state; a state is a set of substrings that end at the same places.
        self._next: list[dict[int, int]] = [{}]
        self._links = [_NONE]
        self._lengths = [0]
        self._latest = [_NONE]
        self._last = _ROOT
        self._match_end = _NONE
        for token in ids:
            self.append(token)

    def __len__(self) -> int:
        return len(self._text)

    def append(self, token: int) -> None:
        """Adds the next id; amortised constant time."""
        nexts, links = self._next, self._links
        end, state, above = len(self._text), len(nexts), self._last
        self._text.append(token)
        nexts.append({})
        links.append(_ROOT)
        self._lengths.append(end + 1)
        self._latest.append(end)
        while above != _NONE and token not in nexts[above]:
            nexts[above][token] = state
            above = links[above]
        if above != _NONE:
            links[state] = self._reached_by(above, token)
        self._last = state
        self._note_occurrence(links[state], end)

    @property
    def match_length(self) -> int:
        """Number of ids in the longest suffix that occurred before."""
        return self._lengths[self._links[self._last]] if self._text else 0

    def draft(self, count: int) -> Copied:
        """Up to `count` tokens that followed an earlier occurrence of the longest repeated suffix.

        The copy starts at the latest occurrence, or close to it. A copy that runs past the end of the text
        goes on with the tokens it has just copied, so that a period is drafted on. Empty without a repeat.
        """
        match_length = self.match_length
        if match_length == 0 or count <= 0:
            return Copied((), match_length)
        return Copied(self._copied((), self._match_end + 1, count), match_length)

    def draft_below(self, path: Sequence[int], count: int) -> Copied:
        """Up to `count` tokens that would follow the text if it went on with `path`; changes nothing.

        They followed an earlier occurrence of the longest suffix of both together; if the suffix occurs more
        than once, not always the latest one. Where that suffix would take long to find, as in a text that
        repeats itself many times, it is sought in `path` alone. Takes time in proportion to `path` and
        `count`.

        Args:
            path: at least one token.
            count: the most tokens of the draft.
        """
        nexts, links, state, length = self._next, self._links, self._last, len(self._text)
        left = _MOST_LINKS
        for token in path:
            while state != _ROOT and token not in nexts[state]:
                left -= 1
                state = links[state] if left > 0 else _ROOT
                length = self._lengths[state]
            if token in nexts[state]:
                state, length = nexts[state][token], length + 1
        if state == _ROOT or count <= 0:
            return Copied((), length)
        return Copied(self._copied(path, self._latest[state] + 1, count), length)

    def _copied(self, path: Sequence[int], start: int, count: int) -> tuple[int, ...]:
        """`count` tokens from this place of the text on; what lies past its end is `path`, then the copy."""
        text = self._text
        copied = text[start : start + count]
        if len(copied) < count:
            copied += path[: count - len(copied)]
        period = len(text) + len(path) - start
        while len(copied) < count:
            copied.append(copied[-period])
        return tuple(copied)

    def _reached_by(self, above: int, token: int) -> int:
        """The state of exactly the strings of state `above` extended by `token`, split off where needed."""
        nexts, links, lengths = self._next, self._links, self._lengths
        target = nexts[above][token]
        if lengths[above] + 1 == lengths[target]:
            return target
        clone = len(nexts)
        nexts.append(nexts[target].copy())
        links.append(links[target])
        lengths.append(lengths[above] + 1)
        self._latest.append(self._latest[target])
        while above != _NONE and nexts[above].get(token) == target:
            nexts[above][token] = clone
            above = links[above]
        links[target] = clone
        return clone

    def _note_occurrence(self, suffix: int, end: int) -> None:
        """Keeps the previous end of the longest repeated suffix, then records `end` for its suffixes too."""
        latest, links = self._latest, self._links
        self._match_end = latest[suffix]
        for _ in range(_REFRESHED):
            if suffix == _ROOT:
                break
            latest[suffix] = end
            suffix = links[suffix]
