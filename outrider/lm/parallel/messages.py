"""Messages (orders) from rank 0 to the other ranks, as int64 words. Pure: slots, ids and parents; no tensors.

The other ranks keep no tables and count no blocks: every pass names the slots of its sessions. So what a
session does between passes (begin, share, give way, end, be evicted) needs a message only where it moves or
adds storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.lm.kv.pool import Run


@dataclass(frozen=True, slots=True)
class RankHello:
    """First order: figures of the model and its pool, which must be the same on every rank."""

    figures: tuple[int, ...]
    """Sizes of vocabulary, context, slots, blocks and planes."""


@dataclass(frozen=True, slots=True)
class RankBeat:
    """Sign of life of rank 0; there is nothing to do."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Last order: the other ranks end."""


@dataclass(frozen=True, slots=True)
class GrowPool:
    """Order to grow the pool's storage."""

    blocks: int
    """Number of blocks in all."""


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Order to copy slots to slots, for a commit or a copied prefix."""

    sources: tuple[int, ...]
    """Slots to read."""
    targets: tuple[int, ...]
    """Slots to write, one for each source."""


@dataclass(frozen=True, slots=True)
class RankedRows:
    """One session's rows in a pass and its table, in numbers alone."""

    runs: tuple[Run, ...]
    """Runs of slots that hold the session's blocks."""
    length: int
    """Number of committed positions."""
    kept: tuple[int, ...]
    """Parents of the nodes kept from earlier passes."""
    tokens: tuple[int, ...]
    """Token id of each row."""
    parents: tuple[int, ...]
    """Parent node of each row."""
    want: tuple[int, ...]
    """Rows whose logits are needed."""


@dataclass(frozen=True, slots=True)
class RankPass:
    """Order to run one forward pass."""

    parts: tuple[RankedRows, ...]
    """Rows of each session, in order."""


RankMessage = RankHello | RankBeat | RankEnd | GrowPool | CopySlots | RankPass
_KINDS: tuple[type[RankMessage], ...] = (RankHello, RankBeat, RankEnd, GrowPool, CopySlots, RankPass)


def to_words(order: RankMessage) -> list[int]:
    """Encodes an order as integers that fit 64 bits."""
    words = [_KINDS.index(type(order))]
    match order:
        case RankHello(figures):
            words += _counted(figures)
        case GrowPool(blocks):
            words.append(blocks)
        case CopySlots(sources, targets):
            words += _counted(sources) + _counted(targets)
        case RankPass(parts):
            words.append(len(parts))
            for part in parts:
                words.append(part.length)
                words += _counted([slot for run in part.runs for slot in run])
                for numbers in (part.kept, part.tokens, part.parents, part.want):
                    words += _counted(numbers)
    return words


def from_words(words: Sequence[int]) -> Iterator[RankMessage]:
    """Decodes the orders that these words hold. Raises ValueError for an unknown or incomplete order."""
    reader = _Reader(words)
    while reader.left:
        yield _read(reader)


def _read(reader: "_Reader") -> RankMessage:
    kind = reader.one()
    if not 0 <= kind < len(_KINDS):
        raise ValueError(f"{kind} is no kind of order")
    match _KINDS[kind].__name__:
        case "RankHello":
            return RankHello(reader.many())
        case "RankBeat":
            return RankBeat()
        case "RankEnd":
            return RankEnd()
        case "GrowPool":
            return GrowPool(reader.one())
        case "CopySlots":
            return CopySlots(reader.many(), reader.many())
    return RankPass(tuple(_read_part(reader) for _ in range(reader.one())))


def _read_part(reader: "_Reader") -> RankedRows:
    length = reader.one()
    slots = reader.many()
    runs = tuple(zip(slots[::2], slots[1::2], strict=True))
    return RankedRows(runs, length, reader.many(), reader.many(), reader.many(), reader.many())


def _counted(numbers: Sequence[int]) -> list[int]:
    return [len(numbers), *numbers]


class _Reader:
    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._words) - self._at

    def one(self) -> int:
        return self._take(1)[0]

    def many(self) -> tuple[int, ...]:
        return self._take(self.one())

    def _take(self, count: int) -> tuple[int, ...]:
        if not 0 <= count <= self.left:
            raise ValueError(f"{count} words are missing of an order")
        begin, self._at = self._at, self._at + count
        return tuple(self._words[begin : self._at])
