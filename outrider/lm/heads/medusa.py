"""Medusa's heads (arXiv 2401.10774): one head per position after the next token, on one hidden state.

Heads whose checkpoint has no output layers use the target's LM head, as in blockwise decoding
(arXiv 1811.03115).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.lm.features import LAST
from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.target_parts import TargetParts, TargetShape


class ResBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of the same width."""
        return rows + nn.functional.silu(self.linear(rows))


class MedusaHeads(nn.Module):
    """Heads 1 to K; head k predicts the token k places behind the token that the LM head predicts.

    Args:
        target: the target whose hidden states the heads read.
        count: K.
        blocks: residual blocks of each head.
        shared: whether the heads use the target's LM head instead of output layers of their own.
    """

    kind: ClassVar[str] = "medusa"
    weights_file: ClassVar[str] = "medusa_lm_head.safetensors"
    left_out: ClassVar[tuple[str, ...]] = ()
    reads: tuple[int, ...] = (LAST,)
    """Layers of the target whose hidden states the heads read."""

    def __init__(self, target: TargetParts, count: int, blocks: int = 1, shared: bool = False) -> None:
        super().__init__()
        self._target = target
        self._blocks, self._shared = blocks, shared
        width, vocabulary_size = target.shape.width, target.shape.vocabulary_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResBlock(width) for _ in range(blocks)),
                *([] if shared else [nn.Linear(width, vocabulary_size, bias=False)]),
            )
            for _ in range(count)
        )

    def __len__(self) -> int:
        return len(self.heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of all heads, ``[K, ..., V]``, at hidden states after the last norm, ``[..., width]``.

        At position i head k predicts the token of position i + 1 + k.
        """
        return torch.stack([self.logits(index, hidden) for index in range(len(self.heads))])

    def logits(self, index: int, hidden: Tensor) -> Tensor:
        """Logits of one head, counted from 0, ``[..., V]``, at hidden states, ``[..., width]``."""
        rows: Tensor = self.heads[index](hidden)
        return self._target.lm_head(rows) if self._shared else rows

    @torch.no_grad()
    def start_from(self, lm_head: Tensor) -> None:
        """Sets every output layer to the target's, ``[V, width]``, as training begins."""
        for head in self.heads:
            for module in head.children():
                if isinstance(module, nn.Linear):
                    module.weight.copy_(lm_head)

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        return {"medusa_num_heads": len(self.heads), "medusa_num_layers": self._blocks}

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to such heads."""
        return "medusa_num_heads" in config.raw

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the heads need of their target. Raises InvalidRequest for numbers out of range."""
        _sizes(config)
        return HeadNeeds(cls.reads, parts=("lm_head",))

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """Published prefixes of weights, with the module's prefixes."""
        return (("", "heads."),)

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> "MedusaHeads":
        """The heads of a checkpoint, without its weights."""
        count, blocks = _sizes(config)
        return cls(target, count, blocks, shared=f"heads.0.{blocks}.weight" not in weights)


def _sizes(config: HeadConfig) -> tuple[int, int]:
    return config.number("medusa_num_heads", 1, 16), config.number("medusa_num_layers", 0, 8, 1)
