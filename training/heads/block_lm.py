"""A small language model that learns to write a block of tokens in one pass (SpecDec, arXiv 2203.16487).

Mask ids behind the vocabulary stand for tokens that are not known yet. A row of the k-th mask sees the text
up to a root and the masks before it, and learns the target's distribution k + 1 places behind the root. The
root's own row goes on learning the next token, so the model still drafts token by token as well.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from outrider.lm.load.masks import mask_ids, note_masks
from training.heads.block_rows import ROOTS_AT_ONCE, block_rows
from training.heads.frozen import FrozenTarget
from training.heads.small_lm import SmallLM


class BlockLM(SmallLM):
    """A causal language model with mask ids, in float32.

    Args:
        source: folder or id of the model to begin with.
        model: the model, with mask ids.
    """

    kind = "block"

    def __init__(self, source: str, model: PreTrainedModel) -> None:
        super().__init__(source, model)
        weights = model.get_input_embeddings().weight
        assert isinstance(weights, torch.Tensor)
        self.masks = mask_ids(model.config, len(weights))

    @classmethod
    def widened(cls, source: str, target: FrozenTarget, masks: int) -> BlockLM:
        """Loads a model and adds mask ids, each of which begins as the mean of all tokens.

        Raises OutriderError where the model cannot draft for the target.
        """
        model = SmallLM.load(source, target).model
        known = target.parts.shape.vocabulary_size
        model.resize_token_embeddings(known + masks, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            assert layer is not None, "FrozenTarget has checked it"
            assert isinstance(layer.weight, torch.Tensor)
            with torch.no_grad():
                layer.weight[known:] = layer.weight[:known].mean(0)
        note_masks(model.config, masks)
        return cls(source, model.requires_grad_(True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states over the target's vocabulary: [..., width] to [..., vocabulary]."""
        return super().logits(hidden)[..., : self.masks.start]

    def block(self, ids: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Hidden states of blocks: ids int64 [rows, length], and roots int64 [roots], ascending.

        Returns [rows, roots, 1 + masks, width]; place k of a root predicts the token k + 1 behind it.
        """
        parts = [self._block(ids, part) for part in roots.split(ROOTS_AT_ONCE)]
        return torch.cat(parts, dim=1)

    def _block(self, ids: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        length, masks = int(roots[-1]) + 1, len(self.masks)
        tokens = torch.arange(self.masks.start, self.masks.stop, device=ids.device).repeat(len(roots))
        rows = block_rows(roots, masks)
        hidden = self.model.base_model(
            input_ids=torch.cat([ids[:, :length], tokens.expand(len(ids), -1)], dim=1),
            attention_mask=rows.mask.expand(len(ids), -1, -1, -1),
            position_ids=rows.positions.expand(len(ids), -1),
            use_cache=False,
        ).last_hidden_state
        masked = hidden[:, length:].unflatten(1, (len(roots), masks))
        return torch.cat([hidden[:, roots, None], masked], dim=2)
