"""The parts of a head of one layer, as a compiled pass reads them: each norm and product by what it does."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.heads.layer import HeadLayer


class HeadParts(NamedTuple):
    """A head's computation in order. None: the head has no such part."""

    embed: Callable[[Tensor], Tensor]
    """The table of embeddings."""
    layer: HeadLayer
    lm_head: Callable[[Tensor], Tensor]
    """The output layer: logits of the target's vocabulary, or of `drafted_ids`."""
    fusion_norm: LlamaRMSNorm | None = None
    """Norm of the target's hidden states side by side, before `fusion`."""
    fusion: nn.Linear | None = None
    """The head's hidden state of the target's; without it, the target's only one is the head's."""
    token_norm: LlamaRMSNorm | None = None
    """Norm of embeddings."""
    hidden_norm: LlamaRMSNorm | None = None
    """Norm of the head's hidden states."""
    projection: nn.Linear | None = None
    """From embedding and hidden state side by side to one row; without it, the layer reads both."""
    adds_normed: bool = False
    """Without projection: whether the layer adds to the normalised hidden states."""
    input_norm: LlamaRMSNorm | None = None
    """Norm of projected rows before attention."""
    final_norm: LlamaRMSNorm | None = None
    """Norm of the layer's output, which is then the expected hidden state."""
    logits_norm: LlamaRMSNorm | None = None
    """Norm of expected hidden states before the output layer alone."""
    drafted_ids: Tensor | None = None
    """Ids of the logits, int64; None: all ids."""
