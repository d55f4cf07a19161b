"""Drafts copied from given texts that the output may resemble (LLMA, Yang et al., arXiv 2304.04487).

A request for an edit can give the texts that the answer will mostly repeat. The output is taken to begin
where one of them does. A place in the texts moves on with the output while both agree. After a difference
several places are possible: the output replaced ids, left some out, or inserted some; or it goes on
elsewhere, where its last ids stand. If they stand in one place alone, that place is a sure one (SAD, Sun et
al., arXiv 2106.04970). All of these places are drafted from as branches of one tree, until the output has
followed one of them. What the output replaced, such as a name, is replaced in all that is copied from then
on. Knows nothing of prompts.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.draft import MAX_DRAFT_NODES, Draft
from speculative.lookup.edits import LearntEdits
from speculative.tree import ROOT

_END = -1
"""Stands behind each text; equals no id."""
_NOWHERE = -1
_PER_TOKEN = (0.08, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97, *(0.985,) * 7, 0.995)
"""Probability that the next id of a place is accepted, by the place's trust.

Lower steps of trust lie in bins of their own of `speculative.calibration`, which corrects these priors."""
_SURE = 6
"""Trust from which a place is one that the output follows; below, each id that agrees counts twice."""
_FIRST = 5
"""Trust of the beginning of the only text; each further text takes one."""
_REPLACED, _INSERTED, _LEFT_OUT = 4, 1, 1
"""Trust of the places near the last sure one, where the output has replaced or inserted ids or left some out;
the last grows by 2 with each id that matches."""
_LEAST_SURVIVAL = 0.05
"""A node that is accepted less often costs more than it saves, as each node is a row of the pass."""
_NEAR = 32
"""Ids behind the last sure place among which the output's last id is looked for."""
_LONGEST_EDIT = 16
"""Ids of the output since the last sure place after which nothing near that place is looked for."""
_GRAM = 3
"""Number of last ids that find a place anywhere; fewer only find one where they stand in one place alone."""
_MOST_MATCHED = 12
"""Number of last ids that are compared to tell places apart."""
_TRIED = 32
"""Number of places that are compared."""
_PLACES = 4
"""Number of places that are drafted from."""
_BITS = 21
"""Bits of an id in the index; more ids than any vocabulary has."""


class CopyPlace(NamedTuple):
    """A place in the texts from which the output may go on."""

    at: int
    """Index of the id that would be the output's next."""
    trust: int
    """Evidence for the place; an index of `_PER_TOKEN`, the last of which stands for more."""
    first: tuple[int, ...] = ()
    """Ids that come before the one at `at`: the rest of an edit's new ids."""
    old: int = _NOWHERE
    """The id with which the edit's old ids begin, while `first` has any."""


class ReferenceFollower:
    """Follows an output through texts, and drafts what may come next.

    Takes some microseconds for each id of the output, and an index of 16 bytes for each id of the texts.

    Args:
        texts: token ids of each text.
    """

    __slots__ = ("_edits", "_gap", "_index", "_left", "_order", "_places", "_recent", "_text")

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        text: list[int] = []
        begins: list[int] = []
        for ids in texts:
            if ids:
                begins.append(len(text))
                text += (*ids, _END)
        self._text = text
        self._index, self._order = _suffix_order(text)
        first = max(1, _FIRST + 1 - len(begins))
        self._places = [CopyPlace(at, first) for at in begins[:_PLACES]]
        self._left = _NOWHERE
        """Place of the first id that differed from the output, where it was followed last; or `_NOWHERE`."""
        self._gap = 0
        """Number of ids of the output since then."""
        self._recent: list[int] = []
        self._edits = LearntEdits()

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the next ids of the output.

        New places are searched for only after the last id.
        """
        for token in tokens[:-1]:
            self._push(token, searches=False)
        for token in tokens[-1:]:
            self._push(token, searches=True)

    def _push(self, token: int, *, searches: bool) -> None:
        recent = self._recent
        recent.append(token)
        if len(recent) > 2 * _MOST_MATCHED:
            del recent[:_MOST_MATCHED]
        best = self._places[0] if self._places else None
        own = [] if best is None else list(self._following(best, token))
        agreed = [*own, *(found for place in self._places[1:] for found in self._following(place, token))]
        sure = best is not None and best.trust >= _SURE
        if agreed and agreed[0].trust > _SURE and (own or sure):
            if self._left != _NOWHERE and not agreed[0].first:
                self._learn_edit(agreed[0].at)
            self._left = _NOWHERE
            self._places = agreed if len(agreed) == 1 else _best(agreed)
            return
        if best is not None and sure and not own:
            self._left, self._gap = best.at, 0
        if self._left != _NOWHERE:
            self._gap += 1
        self._places = _best([*agreed, *self._near(token), *self._anywhere()] if searches else agreed)

    def draft(self, count: int) -> Draft | None:
        """A tree of up to `count` ids from the likeliest places; None where the output has left the texts."""
        count = min(count, MAX_DRAFT_NODES)
        places = [place for place in self._places if place.first or self._text[place.at] != _END]
        if not places or count <= 0:
            return None
        return self._chain(places[0], count) if len(places) == 1 else self._tree(places, count)

    def _chain(self, place: CopyPlace, count: int) -> Draft:
        survivals = _survivals(min(place.trust, len(_PER_TOKEN) - 1))[:count]
        tokens = self._ahead(place, len(survivals))
        size = len(tokens)
        return Draft(tuple(tokens), tuple(range(ROOT, size - 1)), survivals[:size])

    def _tree(self, places: Sequence[CopyPlace], count: int) -> Draft:
        """The likeliest nodes of the chains of several places, which share their common beginnings."""
        tokens: list[int] = []
        parents: list[int] = []
        survivals: list[float] = []
        nodes: dict[tuple[int, int], int] = {}
        waiting: list[tuple[float, int, int, int]] = []
        ahead = [self._ahead(place, count) for place in places]
        for rank, place in enumerate(places):
            heappush(waiting, (-_per_token(place.trust), rank, 0, ROOT))
        while waiting and len(tokens) < count:
            survival, rank, depth, parent = heappop(waiting)
            if depth == len(ahead[rank]) or -survival < _LEAST_SURVIVAL:
                continue
            token = ahead[rank][depth]
            node = nodes.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                survivals.append(-survival)
            each = _per_token(_trust_after(places[rank].trust, depth + 1))
            heappush(waiting, (-survivals[node] * each, rank, depth + 1, node))
        return Draft(tuple(tokens), tuple(parents), tuple(survivals))

    def _ahead(self, place: CopyPlace, count: int) -> list[int]:
        """Up to `count` ids from a place on, edited as the output has edited what it copied."""
        text, edits = self._text, self._edits
        if not edits and not place.first:
            tokens = text[place.at : place.at + count]
            return tokens[: tokens.index(_END)] if _END in tokens else tokens
        tokens = list(place.first)
        at = place.at
        while len(tokens) < count and text[at] != _END:
            edit = edits.at(text, at)
            tokens += (text[at],) if edit is None else edit.new
            at += 1 if edit is None else len(edit.old)
        return tokens[:count]

    def _following(self, place: CopyPlace, token: int) -> Iterable[CopyPlace]:
        """The places after one more id of the output, where it agrees with this place, edited or not."""
        trust = _trust_after(place.trust, 1)
        if place.first:
            if place.first[0] == token:
                yield CopyPlace(place.at, trust, place.first[1:], place.old)
            else:
                self._edits.forget(place.old)
            return
        edit = self._edits.at(self._text, place.at) if self._edits else None
        if edit is not None:
            if edit.new[0] == token:
                yield CopyPlace(place.at + len(edit.old), trust, edit.new[1:], edit.old[0])
            elif edit.old[0] == token:
                self._edits.forget(edit.old[0])
        if self._text[place.at] == token:
            yield CopyPlace(place.at + 1, trust)

    def _learn_edit(self, at: int) -> None:
        """Learns what the output replaced between the place that it left and the one that it follows now."""
        recent, left = self._recent, self._left
        gap = self._gap + 1  # the last id is not counted yet
        if gap > len(recent):
            return
        matched = self._matched(at, gap)
        old, new = (
            self._text[left : max(left, at - matched)],
            recent[len(recent) - gap : len(recent) - matched],
        )
        # What the output has copied as it stands before is no name that it replaces.
        low, high = self._range(old[-_GRAM:]) if old else (0, 0)
        if _END not in old and not (self._order[low:high] <= left).any():
            self._edits.learn(old, new)

    @property
    def _is_near(self) -> bool:
        """Whether the output may still be near the place that it left."""
        return self._left != _NOWHERE and self._gap <= _LONGEST_EDIT

    def _near(self, token: int) -> Iterable[CopyPlace]:
        """Places near the one that the output left: ids were replaced, left out or inserted."""
        left, gap = self._left, self._gap
        if not self._is_near:
            return
        near = self._text[left : left + _NEAR]
        if _END in near:
            del near[near.index(_END) :]
        if gap < len(near):
            yield CopyPlace(left + gap, max(1, _REPLACED + 1 - gap))
        for ahead, id_ in enumerate(near):
            if id_ == token:
                matched = self._matched(left + ahead + 1, gap)
                yield CopyPlace(left + ahead + 1, _LEFT_OUT + 2 * matched - (ahead > gap))
        yield CopyPlace(left, _INSERTED)

    def _anywhere(self) -> Iterable[CopyPlace]:
        """Places anywhere that the output's last ids precede: a run of `_GRAM` of them, or a single one."""
        for size in range(min(_GRAM, len(self._recent)), 0, -1):
            low, high = self._range(self._recent[-size:])
            if high - low == 1 or (size == _GRAM and high > low):
                break
        else:
            return
        ends = self._order[low : min(high, low + _TRIED)]
        found = sorted(((self._matched(int(end), _MOST_MATCHED), -int(end)) for end in ends), reverse=True)
        longest = found[0][0]
        ties = sum(matched == longest for matched, _ in found)
        # Texts repeat themselves, so right after a difference the place at hand is as likely as a far one.
        most = _REPLACED + self._gap - 1 if self._is_near else _MOST_MATCHED + 1
        for matched, end in found[:2]:
            trust = matched + 1 if ties == 1 and matched == longest else min(matched, _GRAM)
            yield CopyPlace(-end, min(trust, most))

    def _matched(self, end: int, most: int) -> int:
        """Number of ids before `end`, up to `most`, that equal the output's last ids."""
        recent, text = self._recent, self._text
        most = min(most, len(recent), end)
        for count in range(most):
            if text[end - 1 - count] != recent[-1 - count]:
                return count
        return most

    def _range(self, ids: Sequence[int]) -> tuple[int, int]:
        """The range of `_order` of the places that these ids precede."""
        low = _key(ids)
        high = low + (1 << _BITS * (_GRAM - len(ids)))
        first, behind = np.searchsorted(self._index, (low, high))
        return int(first), int(behind)


def _key(ids: Sequence[int]) -> int:
    """The last ids as one number, the last id in the highest bits; missing ids are 0."""
    key = 0
    for token in reversed(ids):
        key = key << _BITS | (token + 1) & (1 << _BITS) - 1
    return key << _BITS * (_GRAM - len(ids))


def _suffix_order(text: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The key of the ids before each place, ascending, and the places in that order."""
    ids = np.array(text, dtype=np.int64) + 1
    keys = np.zeros(len(ids), dtype=np.int64)
    for back in range(_GRAM):
        shifted = np.zeros(len(ids), dtype=np.int64)
        shifted[back:] = ids[: len(ids) - back]
        keys |= (shifted & (1 << _BITS) - 1) << _BITS * (_GRAM - 1 - back)
    places = np.flatnonzero(ids > 0)
    order = places[np.argsort(keys[places], kind="stable")]
    return keys[order], order + 1


def _best(places: Iterable[CopyPlace]) -> list[CopyPlace]:
    """The places of the most trust, each once; of equal ones the first."""
    found: dict[tuple[int, tuple[int, ...]], CopyPlace] = {}
    for place in sorted(places, key=lambda place: -place.trust):
        found.setdefault((place.at, place.first), place)
    return list(found.values())[:_PLACES]


def _trust_after(trust: int, agreed: int) -> int:
    """Trust of a place after this many more ids that agree."""
    doubled = min(agreed, max(0, -(-(_SURE - trust) // 2)))
    return trust + agreed + doubled


def _per_token(trust: int) -> float:
    return _PER_TOKEN[min(trust, len(_PER_TOKEN) - 1)]


@lru_cache(maxsize=len(_PER_TOKEN))
def _survivals(trust: int) -> tuple[float, ...]:
    """Survival of each node of a chain from a place of this trust."""
    survivals: list[float] = []
    survival = 1.0
    for depth in range(MAX_DRAFT_NODES):
        survival *= _per_token(_trust_after(trust, depth))
        if survival < _LEAST_SURVIVAL:
            break
        survivals.append(survival)
    return tuple(survivals)
