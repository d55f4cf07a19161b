"""Attention metadata of a step: which slots its rows may see, as arrays that every kernel reads alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.lm.attention.interface import AttentionParams

WORDS = 8
"""Number of int32 words in a row's mask over its session's branching nodes."""

MOST_BRANCHING = 32 * WORDS
"""Largest number of branching nodes that a session may have in a static step; its trunk may be of any
length."""

SPLIT_ITEMS = 64
"""Largest number of items that tiles are cut into: about four programs, times the key heads, for each
processor of a large GPU. A step of more tiles has an item for each tile besides."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention metadata of a step for layers of one sliding window; all arrays are int32 on the device.

    A tile is up to ``tile_rows`` rows of one session, an item is a tile with a span of the session's slots.
    The leading nodes of a session that all later nodes descend from are its trunk: a prompt is nothing else,
    and a tree has at least its root there. Row ``r`` sees slot ``i`` of its session where
    ``first[r] <= i < upto[r]`` (committed positions and trunk), or where bit ``i - base`` of its mask is set
    (branching nodes, which begin at slot ``base``). Rows that pad the step belong to no tile.
    """

    tiles: torch.Tensor
    """``[rows, 4]``, per tile: first row, row count, offset of the session's blocks in ``tables``, and the
    slot of the session's first branching node (``base``)."""
    row_tile: torch.Tensor
    """``[rows]``: tile of each row, -1 for padding."""
    items: torch.Tensor
    """``[items, 3]``, per item: tile, first slot, slot behind the last; an empty span for padding."""
    spans: torch.Tensor
    """``[rows, 2]``, per tile: its first item and its number of items."""
    upto: torch.Tensor
    """``[rows]``: the slot behind the last one of committed positions and trunk that each row sees."""
    first: torch.Tensor
    """``[rows]``: the first slot of committed positions and trunk within each row's window."""
    masks: torch.Tensor
    """``[rows, WORDS]``: bit ``j`` of a row is set if it sees its session's branching node ``j``: the row
    itself and its ancestors within the window."""
    tables: torch.Tensor
    """Block indices of all sessions, one session after another."""
    tile_rows: int
    """Largest number of rows in a tile."""


WriteRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes a plane ``[heads, slots, width]``, slot indices and rows ``[heads, rows, width]``; writes the rows to
these slots."""

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, AttentionParams], torch.Tensor
]
"""An attention kernel: queries ``[rows, heads, width]``, keys ``[key heads, slots, width]`` and values of all
slots, to output ``[rows, heads, value width]``; zero for padding rows."""
