"""Looking a context up in mapped shards: one search per shard finds its longest suffix.

A shard's text is backwards, and its positions are in the order of what begins there. Where the reversed
context would stand in that order, the positions beside it agree with it the furthest. A directory in memory
narrows the search to a thousand positions before anything on disk is touched.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from retrieval_service.corpus.layout import ENTRY_IDS, STRIDE
from retrieval_service.trie import CountedTrie, counted

LONGEST_MATCH = 32
"""Ids of a context that are looked at: a longer match says nothing more about what follows."""
MOST_READ = 64
"""Occurrences that are read; of more, these many at equal distances in the order of what precedes them."""


class Shard(NamedTuple):
    """A mapped shard with at least one position.

    Attributes:
        text: ids, big-endian, `width` bytes each.
        suffixes: positions in the text, unsigned 32-bit.
        directory: the first `ENTRY_IDS` ids of every `STRIDE`th suffix.
        width: bytes of an id.
        vocabulary: all ids are below it.
    """

    text: bytes
    suffixes: memoryview
    directory: Sequence[bytes]
    width: int
    vocabulary: int

    def place(self, key: bytes) -> tuple[int, int]:
        """The place of the reversed context among the suffixes, and the number of its ids found there."""
        text, width, size = self.text, self.width, len(key)
        short = key[: ENTRY_IDS * width]
        first = max(0, bisect_left(self.directory, short) - 1) * STRIDE
        last = min(len(self.suffixes), bisect_right(self.directory, short) * STRIDE)
        at = bisect_left(self.suffixes, key, first, last, key=lambda p: text[p * width : p * width + size])
        found = 0
        for neighbour in self.suffixes[max(0, at - 1) : at + 1]:
            start = neighbour * width
            found = max(found, _common(key, text[start : start + size]) // width)
        return at, found

    def span(self, key: bytes, at: int) -> tuple[int, int]:
        """Range of the suffixes that begin with `key`, end exclusive; `at` is what `place` found."""
        text, width, size = self.text, self.width, len(key)

        def begins(position: int) -> bytes:
            return text[position * width : position * width + size]

        short = key[: ENTRY_IDS * width]
        first = max(0, bisect_left(self.directory, short) - 1) * STRIDE
        above = short.ljust(ENTRY_IDS * width + 1, b"\xff")
        last = min(len(self.suffixes), bisect_right(self.directory, above) * STRIDE)
        low = bisect_left(self.suffixes, key, first, at, key=begins)
        return low, bisect_right(self.suffixes, key, at, last, key=begins)

    def following(self, index: int, depth: int) -> tuple[int, ...]:
        """At most `depth` ids that follow the occurrence at `index`, within its document."""
        end = self.suffixes[index]
        start = max(0, end - depth)
        raw = self.text[start * self.width : end * self.width]
        code = "H" if self.width == 2 else "I"
        ids: tuple[int, ...] = struct.unpack(f">{len(raw) // self.width}{code}", raw)[::-1]
        if max(ids, default=0) < self.vocabulary:
            return ids
        # The separator; or the text is damaged, and no id that the target lacks may come of it.
        return ids[: next(number for number, id_ in enumerate(ids) if id_ >= self.vocabulary)]


def look_up(
    shards: Sequence[Shard], ids: Sequence[int], *, node_limit: int, depth: int
) -> CountedTrie | None:
    """Looks up the longest suffix of `ids` that an id follows in any shard, and what follows it; or None.

    All shards are of one tokenizer. At most `LONGEST_MATCH` ids are matched; counts are of the occurrences
    read, at most `MOST_READ` of all shards together, never scaled up. Depends on nothing but its arguments.
    """
    if not shards or node_limit < 1 or depth < 1:
        return None
    key = _key(ids, shards[0].vocabulary, shards[0].width)
    places = [shard.place(key) for shard in shards] if key else []
    length = max((found for _, found in places), default=0)
    if not length:
        return None
    key = key[: length * shards[0].width]
    spans = [
        (shard, *shard.span(key, at))
        for shard, (at, found) in zip(shards, places, strict=True)
        if found == length
    ]
    read = [shard.following(index, depth) for shard, index in _sample(spans)]
    return counted(read, length, node_limit)


def _key(ids: Sequence[int], vocabulary: int, width: int) -> bytes:
    """The last ids, latest first, up to the first id outside the vocabulary, as bytes of a shard's text."""
    last = ids[-LONGEST_MATCH:][::-1]
    usable = next((n for n, id_ in enumerate(last) if not 0 <= id_ < vocabulary), len(last))
    return struct.pack(f">{usable}{'H' if width == 2 else 'I'}", *last[:usable])


def _sample(spans: Sequence[tuple[Shard, int, int]]) -> list[tuple[Shard, int]]:
    total = sum(high - low for _, low, high in spans)
    take = min(total, MOST_READ)
    chosen = [number * total // take for number in range(take)]
    picked: list[tuple[Shard, int]] = []
    before = 0
    for shard, low, high in spans:
        after = before + high - low
        inside = chosen[bisect_left(chosen, before) : bisect_left(chosen, after)]
        picked += [(shard, low + number - before) for number in inside]
        before = after
    return picked


def _common(left: bytes, right: bytes) -> int:
    """Length of the common prefix, in bytes; `right` may be shorter."""
    if len(right) < len(left):
        left = left[: len(right)]
    differing = int.from_bytes(left) ^ int.from_bytes(right)
    return len(left) - (differing.bit_length() + 7) // 8
