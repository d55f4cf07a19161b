"""What the rows of a step may see, as arrays that a kernel reads: one layout for every implementation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.lm.attention import How

WORDS = 8
"""int32 words of a row's mask over its session's nodes."""

MOST_NODES = 32 * WORDS
"""Nodes that a session may have in a step of this kind."""

SPLIT_ITEMS = 64
"""A step of fewer tiles is cut into up to so many items; one of more tiles has an item for each. Times the
key heads, about four programs for each of a large GPU's processors."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Who sees what in one kind of layer; int32 on the device throughout.

    A tile is up to ``tile_rows`` rows of one session, an item is a tile with a span of the session's slots.
    Row ``r`` sees slot ``i`` of its session where ``first[r] <= i < length`` (committed), or where bit
    ``i - length`` of its mask is set (nodes). Rows that pad the step belong to no tile.
    """

    tiles: torch.Tensor
    """``[rows, 4]``: first row, rows, where the session's blocks begin in ``tables``, committed length."""
    row_tile: torch.Tensor
    """``[rows]``: the row's tile, -1 for padding."""
    items: torch.Tensor
    """``[items, 3]``: tile, first slot, slot behind the last; an empty span for padding."""
    spans: torch.Tensor
    """``[rows, 2]``: per tile its first item and how many it has."""
    first: torch.Tensor
    """``[rows]``: the first committed position that the layer's window lets the row see."""
    masks: torch.Tensor
    """``[rows, WORDS]``: bit ``j`` of the row is its session's node ``j``: ancestors within the window, and
    itself."""
    tables: torch.Tensor
    """Blocks of all sessions, one session after another."""
    tile_rows: int


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Seen, How], torch.Tensor]
"""From queries ``[rows, heads, width]``, all slots' keys ``[key heads, slots, width]`` and their values to
``[rows, heads, value width]``; zero for padding rows."""
