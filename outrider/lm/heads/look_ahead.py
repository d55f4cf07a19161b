"""PaSS (arXiv 2311.13581): embeddings of look-ahead tokens, which the target itself reads as input.

Rows of look-ahead tokens behind a text give the target's guesses further away: the row of the k-th one gives
the token k places behind the next one. The embeddings are all that is trained. The paper's authors published
no weights, so the layout is Outrider's own.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.target_parts import TargetParts, TargetShape

_COUNT = "look_ahead_tokens"


class LookAheadEmbeddings(nn.Module):
    """One embedding for each look-ahead token.

    Args:
        target: the target that reads the embeddings.
        count: number of look-ahead tokens.
    """

    kind: ClassVar[str] = "pass"
    weights_file: ClassVar[str] = "model.safetensors"
    left_out: ClassVar[tuple[str, ...]] = ()

    def __init__(self, target: TargetParts, count: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.zeros(count, target.shape.width))

    def __len__(self) -> int:
        return len(self.embeddings)

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        return {_COUNT: len(self), "hidden_size": self.embeddings.shape[1]}

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to such embeddings."""
        return _COUNT in config.raw

    @classmethod
    def count(cls, config: HeadConfig) -> int:
        """Number of look-ahead tokens of a checkpoint. Raises InvalidRequest for a number out of range."""
        return config.number(_COUNT, 1, 16)

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the embeddings need of their target. Raises OutriderError for those of another width."""
        cls.count(config)
        width = config.number("hidden_size", 1, 2**20)
        if width != shape.width:
            raise config.refusal(cls.kind, f"its width is {width}, the target's {shape.width}")
        return HeadNeeds((), parts=())

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """None: the module uses the published names."""
        return ()

    @classmethod
    def of(
        cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]
    ) -> "LookAheadEmbeddings":
        """The embeddings of a checkpoint, without its weights."""
        return cls(target, cls.count(config))
