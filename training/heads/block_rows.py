"""Rows of guesses behind many roots of a text, which one pass of a model computes together.

Such rows are the masks of a block drafter and the look-ahead tokens of PaSS. Those of one root see the text
up to the root and one another in their order, and nothing of other roots' rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROOTS_AT_ONCE = 64
"""Roots whose rows go through the model with one copy of the text."""


class BlockRows(NamedTuple):
    """What a pass over a text and over rows behind its roots takes, beside the rows' embeddings."""

    mask: torch.Tensor
    """Whether a row sees another one, bool [1, 1, all, all]; the text's rows come first."""
    positions: torch.Tensor
    """Position of each row, int64 [1, all]."""


def block_rows(roots: torch.Tensor, count: int) -> BlockRows:
    """The pass over a text up to its last root, and over `count` rows behind each root.

    Args:
        roots: positions int64 [roots], ascending.
        count: number of rows behind each root.
    """
    text = torch.arange(int(roots[-1]) + 1, device=roots.device)
    behind = torch.arange(count, device=roots.device)
    root_of = torch.cat([text, roots.repeat_interleave(count)])
    place_of = torch.cat([torch.full_like(text, -1), behind.repeat(len(roots))])
    numbers = torch.arange(len(roots), device=roots.device)
    block_of = torch.cat([torch.full_like(text, -1), numbers.repeat_interleave(count)])
    of_text = (place_of < 0)[None] & (root_of[None] <= root_of[:, None])
    of_block = (
        (block_of[None] == block_of[:, None]) & (place_of[None] >= 0) & (place_of[None] <= place_of[:, None])
    )
    return BlockRows((of_text | of_block)[None, None], (root_of + place_of + 1)[None])
