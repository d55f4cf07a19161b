"""The attention of a step in plain torch, tile by tile: slow; the reference for the Triton kernel."""

import torch

from outrider.lm.attention.interface import AttentionParams
from outrider.lm.attention.metadata import AttentionMetadata
from outrider.lm.kv.blocks import BLOCK


def attend_gathered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention of a step's rows over the slots they see, in float32; reads the metadata on the host.

    An `outrider.lm.attention.metadata.Attend`.
    """
    rows, heads, width = query.shape
    scale = width**-0.5 if params.scaling is None else params.scaling
    output = query.new_zeros(rows, heads, values.shape[2])
    for (low, count, table, base), (item, items) in zip(
        metadata.tiles.tolist(), metadata.spans.tolist(), strict=True
    ):
        if not items:
            continue
        spans = metadata.items[item : item + items].tolist()
        at = torch.arange(spans[0][1], spans[-1][2], device=query.device)
        slots = metadata.tables[table + at // BLOCK].long() * BLOCK + at % BLOCK
        part = slice(low, low + count)
        mixed = _attend(
            query[part].transpose(0, 1).float(),
            keys.index_select(1, slots).float(),
            values.index_select(1, slots).float(),
            _allowed(metadata.masks[part], metadata.first[part], metadata.upto[part], at, base),
            scale,
            params,
        )
        output[part] = mixed.transpose(0, 1).to(query.dtype)
    return output


def _allowed(
    masks: torch.Tensor, first: torch.Tensor, upto: torch.Tensor, at: torch.Tensor, base: int
) -> torch.Tensor:
    """Which slots each row may see: bool ``[rows, slots]``."""
    node = (at - base).clamp_min(0)
    bits = (masks[:, node // 32] >> (node % 32)) & 1
    return torch.where(at < base, (at >= first[:, None]) & (at < upto[:, None]), bits == 1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention output ``[heads, rows, width]`` of one tile."""
    heads, rows, _ = query.shape
    groups = heads // keys.shape[0]
    scores = query @ keys.repeat_interleave(groups, dim=0).transpose(1, 2) * scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(heads, 1, 1).expand(heads, rows, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return weights @ values.repeat_interleave(groups, dim=0)
