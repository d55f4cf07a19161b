"""The static shapes of steps: the rows, wanted rows and rows of a tile that a captured graph has. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.lm.attention.partition import items_of
from outrider.lm.plan import PackedRows

BUCKETS = (
    *(1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    *(448, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096),
)
"""Numbers of rows to which steps are padded. Trees of 2**k nodes have a pending row besides. Beyond some
hundred rows a GPU is bound by computation, and padding costs its share."""

FEW_WANTED = 64
"""Number of wanted rows to which those of a longer step are padded where that suffices: of a prompt's rows
none or one is wanted, and the output layer is the largest of all."""

_COARSE = frozenset((1, 4, 16, 64, 256, 1024))
"""Sizes that are captured first, with the largest one: a step of any other size can be padded to them."""

_SMALL, _LARGE = 16, 64
"""Number of queries in a small and in a large tile: rows times query heads that share a key head."""

_MOST_SMALL = 256
"""Largest number of rows for which there are small tiles: longer steps keep a device busy anyway."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """The static shape of a step; each shape has one captured graph."""

    rows: int
    """Number of rows with padding: one of BUCKETS."""
    wanted: int
    """Number of wanted rows with padding."""
    tile_rows: int
    """Largest number of rows in a tile."""

    @property
    def items(self) -> int:
        """Number of items with padding."""
        return items_of(self.rows)

    def holds(self, other: "GraphShape") -> bool:
        """Whether a step of the other shape can run as a step of this one; tiles of any size can."""
        return self.rows >= other.rows and self.wanted >= other.wanted


def graph_shape(rows: Sequence[PackedRows], wanted: int, groups: int) -> GraphShape:
    """The smallest shape that holds the rows of a pass; ``groups`` query heads share a key head."""
    count = padded(rows[-1].high)
    longest = max(each.high - each.low for each in rows)
    small = max(1, _SMALL // groups)
    if longest <= small and count <= _MOST_SMALL:
        return GraphShape(count, count, small)
    return GraphShape(count, _wanted(count, wanted), max(1, _LARGE // groups))


def padded(rows: int) -> int:
    """The smallest size that holds ``rows`` rows."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


def all_shapes(max_rows: int, groups: int) -> tuple[list[GraphShape], list[GraphShape]]:
    """All shapes of steps of up to ``max_rows`` rows: those that any step can be padded to, and the others.

    Both lists begin with the largest, so that a capture in this order sizes its memory once.
    """
    small, large = max(1, _SMALL // groups), max(1, _LARGE // groups)
    sizes = [bucket for bucket in BUCKETS if bucket <= padded(max_rows)]
    found = {GraphShape(size, size, small) for size in sizes if size <= _MOST_SMALL}
    for size in sizes:
        if size > small:
            found |= {GraphShape(size, wanted, large) for wanted in (size, _wanted(size, 0))}
    coarse = {shape for shape in found if shape.rows in _COARSE or shape.rows == sizes[-1]}
    return sorted(coarse, reverse=True), sorted(found - coarse, reverse=True)


def smallest_holding(shape: GraphShape, captured: Iterable[GraphShape]) -> GraphShape | None:
    """The captured shape with the least padding for a step of ``shape``; None where none holds the step."""
    fitting = [each for each in captured if each.holds(shape)]
    return min(
        fitting, key=lambda each: (each.rows, each.wanted, each.tile_rows != shape.tile_rows), default=None
    )


def _wanted(rows: int, wanted: int) -> int:
    return FEW_WANTED if wanted <= FEW_WANTED < rows else rows
