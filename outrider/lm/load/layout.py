"""Layout of a model's KV cache, found by watching one row go through the model.

Every layer must write keys and values to the cache and then attend through the attention interface. These
calls show heads and widths, which configs of different families name differently or not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outrider.lm.attention.interface import AttentionParams, PackedCache
from outrider.lm.kv.pool import KVLayout
from speculative.errors import ModelRefused

RunModel = Callable[[PackedCache, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model: cache layout, logit width, sliding windows and head groups."""

    layout: KVLayout
    vocabulary_size: int
    """Width of the logits."""
    logits_dtype: torch.dtype
    windows: tuple[int, ...]
    """Sliding windows of the layers that have one, in positions, ascending."""
    groups: int
    """Largest number of query heads that share a key head."""


@dataclass(slots=True)
class _Seen:
    planes: list[tuple[int, int]] = field(default_factory=list)
    windows: set[int] = field(default_factory=set)
    groups: int = 1
    dtypes: set[torch.dtype] = field(default_factory=set)


class _WatchingCache(PackedCache):
    """Records shapes. Attention over a single row is that row's own value."""

    def __init__(self, model_type: str) -> None:
        super().__init__(model_type)
        self.seen = _Seen()

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        self.seen.planes += [(keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])]
        self.seen.dtypes |= {keys.dtype, values.dtype}
        groups = query.shape[1] // keys.shape[1]
        self.seen.groups = max(self.seen.groups, groups)
        if params.window is not None:
            self.seen.windows.add(params.window)
        return values.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()


@torch.inference_mode()
def find_layout(run: RunModel, model_type: str, device: torch.device, layers: int) -> ModelShape:
    """The model's KV layout, found by running one row through it.

    Raises ModelRefused unless all ``layers`` layers attend through our attention.
    """
    cache = _WatchingCache(model_type)
    row = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        logits = run(cache, row, row, 1)
    except ModelRefused:
        raise
    except Exception as error:
        raise cache.failure(error) from error
    cache.finish(layers)
    seen = cache.seen
    if len(seen.dtypes) != 1:
        raise cache.refusal(f"its layers cache in several dtypes: {sorted(map(str, seen.dtypes))}")
    layout = KVLayout(tuple(seen.planes), seen.dtypes.pop(), device)
    return ModelShape(layout, logits.shape[-1], logits.dtype, tuple(sorted(seen.windows)), seen.groups)
