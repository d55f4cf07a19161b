"""Heads of one decoder layer over pairs: the hidden state of a position, and the token that follows it."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.lm.heads.layer import HeadLayer, attend
from outrider.lm.heads.parts import HeadParts


class Pairs(NamedTuple):
    """Pairs of hidden state and token, as the layer takes them."""

    rows: Tensor
    """Rows that attention reads."""
    residual: Tensor
    """Rows to which the layer adds, ``[..., rows, hidden]``."""


class PairHead(nn.Module, ABC):
    """Base of heads of one layer, such as EAGLE's.

    Token i and the hidden state of position i - 1 pair at rotary position i - 1.
    """

    reads: tuple[int, ...]
    """Layers of the target whose hidden states the head reads."""
    layer: HeadLayer

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The head's hidden states, ``[..., hidden]``, of the target's, ``[..., len(reads), width]``."""

    @abstractmethod
    def pairs(self, tokens: Tensor, hidden: Tensor) -> Pairs:
        """Pairs of hidden states, ``[..., hidden]``, with the ids of the tokens that follow, ``[...]``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the target's vocabulary, ``[..., rows, V]``; -inf for ids that are never drafted."""

    @abstractmethod
    def parts(self) -> HeadParts:
        """What a compiled pass computes with."""

    def finish(self, pairs: Pairs, attended: Tensor) -> Tensor:
        """Expected hidden states of pairs, ``[..., rows, hidden]``, from what attention gave."""
        return self.layer.finish(pairs.residual, attended)

    def keys_values(self, pairs: Pairs, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of pairs at rotary positions, ``[rows]``: ``[kv_heads, rows, head_dim]`` each."""
        attention = self.layer.self_attn
        return attention.keys_values(pairs.rows, attention.rotation(positions))

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Hidden states that the head expects, for whole sequences at once, as in training.

        Args:
            tokens: ids int64 ``[batch, n]``; ``tokens[:, i]`` follows the position of ``hidden[:, i]``.
            hidden: ``[batch, n, hidden]``: the result of `fuse`, or of `forward` in the step before.

        Returns:
            ``[batch, n, hidden]``; `logits` of row i predict the token behind ``tokens[:, i]``.
        """
        attention = self.layer.self_attn
        pairs = self.pairs(tokens, hidden)
        rotation = attention.rotation(torch.arange(tokens.shape[1], device=tokens.device))
        keys, values = attention.keys_values(pairs.rows, rotation)
        attended = attend(attention.queries(pairs.rows, rotation), keys, values, causal=True)
        return self.finish(pairs, attended)
