"""Attention metadata of a step: which slots its rows may see, as arrays that every kernel reads alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.lm.attention.interface import AttentionParams

WORDS = 8
"""Number of int32 words in a row's mask over its session's nodes."""

MOST_NODES = 32 * WORDS
"""Largest number of nodes that a session may have in a static step."""

SPLIT_ITEMS = 64
"""Largest number of items into which a step of fewer tiles is cut; a step of more tiles has an item per tile.
Times the key heads, that is about four programs for each processor of a large GPU."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention metadata of a step for layers of one sliding window; all arrays are int32 on the device.

    A tile is up to ``tile_rows`` rows of one session, an item is a tile with a span of the session's slots.
    Row ``r`` sees slot ``i`` of its session where ``first[r] <= i < length`` (committed), or where bit
    ``i - length`` of its mask is set (nodes). Rows that pad the step belong to no tile.
    """

    tiles: torch.Tensor
    """``[rows, 4]``, per tile: first row, row count, offset of the session's blocks in ``tables``, and the
    session's committed length."""
    row_tile: torch.Tensor
    """``[rows]``: tile of each row, -1 for padding."""
    items: torch.Tensor
    """``[items, 3]``, per item: tile, first slot, slot behind the last; an empty span for padding."""
    spans: torch.Tensor
    """``[rows, 2]``, per tile: its first item and its number of items."""
    first: torch.Tensor
    """``[rows]``: the first committed position that each row sees in the layer's window."""
    masks: torch.Tensor
    """``[rows, WORDS]``: bit ``j`` of a row is set if it sees its session's node ``j``: the row itself and
    its ancestors within the window."""
    tables: torch.Tensor
    """Block indices of all sessions, one session after another."""
    tile_rows: int
    """Largest number of rows in a tile."""


Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, AttentionParams], torch.Tensor
]
"""An attention kernel: queries ``[rows, heads, width]``, keys ``[key heads, slots, width]`` and values of all
slots, to output ``[rows, heads, value width]``; zero for padding rows."""
