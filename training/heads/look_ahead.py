"""Look-ahead embeddings (PaSS) in training: the frozen target reads them behind roots of a text."""

from __future__ import annotations

import torch

from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from training.heads.block_rows import ROOTS_AT_ONCE, block_rows
from training.heads.frozen import FrozenTarget


class TrainedLookAhead(LookAheadEmbeddings):
    """Look-ahead embeddings with the target that reads them.

    Args:
        target: the target, which stays as it is.
        count: number of look-ahead tokens.
    """

    def __init__(self, target: FrozenTarget, count: int) -> None:
        super().__init__(target.parts, count)
        self._target = target
        table = target.model.get_input_embeddings()
        assert isinstance(table, torch.nn.Module)
        weights = table.weight
        assert isinstance(weights, torch.Tensor)
        # Some families multiply embeddings by a constant, in the table itself.
        self._scale = float(getattr(table, "embed_scale", 1.0))
        generator = torch.Generator().manual_seed(count)
        with torch.no_grad():
            # Each begins near the mean of all tokens, and no two alike.
            drawn = torch.randn(self.embeddings.shape, generator=generator).to(weights)
            self.embeddings.copy_(weights.float().mean(0) + drawn.float() * weights.float().std(0) * 0.1)
        self.to(target.device)

    @classmethod
    def trained(cls, target: FrozenTarget, embeddings: LookAheadEmbeddings) -> TrainedLookAhead:
        """Embeddings that were trained before, such as those of a checkpoint, with their target."""
        made = cls(target, len(embeddings))
        with torch.no_grad():
            made.embeddings.copy_(embeddings.embeddings)
        return made

    def hidden(self, ids: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Hidden states of the look-ahead tokens behind roots, [rows, roots, count, width].

        Args:
            ids: int64 [rows, length].
            roots: int64 [roots], ascending; the first look-ahead token stands one place behind its root.
        """
        return torch.cat([self._hidden(ids, part) for part in roots.split(ROOTS_AT_ONCE)], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, [..., width] to [..., vocabulary]."""
        return self._target.parts.lm_head(hidden)

    def _hidden(self, ids: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        length, rows = int(roots[-1]) + 1, block_rows(roots, len(self))
        text = self._target.parts.embed(ids[:, :length])
        added = (self.embeddings * self._scale).repeat(len(roots), 1)
        hidden = self._target.hidden(
            torch.cat([text, added.expand(len(ids), -1, -1)], dim=1),
            rows.mask.expand(len(ids), -1, -1, -1),
            rows.positions.expand(len(ids), -1),
        )
        ahead: torch.Tensor = hidden[:, length:].unflatten(1, (len(roots), len(self)))
        return ahead
