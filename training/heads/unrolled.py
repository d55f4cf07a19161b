"""Heads over whole rows of text, as training and measurement run them.

Medusa's heads read the true hidden state of a root alone, Hydra's the tokens behind the root as well. A head
of one layer (EAGLE, EAGLE-3, multi-token prediction) feeds its own estimate back, so its steps are simulated
(HASS, Zhang et al., 2025; training-time test in EAGLE-3): the estimate of one step is the next step's input,
and a place attends to the true pairs up to its root and to the estimates behind the root, as it will while it
drafts. A small language model reads the text itself. One with masks reads the text up to each root, as does
the target that reads look-ahead tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outrider.lm.features import LAST
from outrider.lm.heads.hydra import HydraHeads
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.pair_head import PairHead
from training.heads.block_lm import BlockLM
from training.heads.look_ahead import TrainedLookAhead
from training.heads.small_lm import SmallLM

TrainedHead = MedusaHeads | HydraHeads | PairHead | SmallLM | TrainedLookAhead

Step = tuple[torch.Tensor, torch.Tensor | None]
"""Logits [rows, roots, vocabulary], and estimated features [rows, places, width] where a head has any."""


def unrolled(
    head: TrainedHead, ids: torch.Tensor, features: torch.Tensor, depth: int, roots: torch.Tensor
) -> Iterator[Step]:
    """For k = 1 .. depth: logits of position t + k + 1 from each root t, and estimated features of t + k.

    The true tokens are given at every step, which changes nothing before a chain's first error; a block is
    drafted without them.

    Args:
        head: the head, on the device of `features`.
        ids: int64 [rows, length].
        features: hidden states that the head reads: of the last norm, [rows, length, width], or of several
            layers, [rows, length, layers, width].
        depth: number of steps.
        roots: positions below `length - depth` whose logits are wanted, int64 [roots].
    """
    if isinstance(head, MedusaHeads):
        hidden = features[:, roots]
        yield from ((head.logits(index, hidden), None) for index in range(depth))
    elif isinstance(head, HydraHeads):
        hidden = features[:, roots]
        for index in range(depth):
            path = ids[:, roots[:, None] + torch.arange(1, index + 2, device=roots.device)]
            yield head.logits(index, hidden, path), None
    elif isinstance(head, BlockLM):
        blocks = head.block(ids, roots + 1)  # a draft begins behind the token that the target adds to a root
        yield from ((head.logits(blocks[:, :, place]), None) for place in range(depth))
    elif isinstance(head, TrainedLookAhead):
        ahead = head.hidden(ids, roots)
        yield from ((head.logits(ahead[:, :, place]), None) for place in range(depth))
    elif isinstance(head, SmallLM):
        hidden = head.hidden(ids)
        yield from ((head.logits(hidden[:, roots + step]), None) for step in range(1, depth + 1))
    else:
        yield from _simulated(head, ids, features, depth, roots)


def layers_of(head: TrainedHead) -> tuple[int, ...]:
    """Layers of the target that a head reads in training."""
    return head.reads if isinstance(head, PairHead) else (LAST,)


def _simulated(
    head: PairHead, ids: torch.Tensor, features: torch.Tensor, depth: int, roots: torch.Tensor
) -> Iterator[Step]:
    places = features.shape[1] - depth
    attention = head.layer.self_attn
    read = features if features.ndim == 4 else features[:, :, None]
    hidden = head.fuse(read[:, :places])
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for step in range(1, depth + 1):
        pairs = head.pairs(ids[:, step : step + places], hidden)
        positions = torch.arange(step - 1, step - 1 + places, device=ids.device)
        rotation = attention.rotation(positions)
        key, value = attention.keys_values(pairs.rows, rotation)
        queries = attention.queries(pairs.rows, rotation)
        repeats = queries.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(repeats, dim=1))
        values.append(value.repeat_interleave(repeats, dim=1))
        hidden = head.finish(pairs, _attended(queries, keys, values))
        yield head.logits(hidden[:, roots]), hidden


def _attended(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention of place t to the first step's keys up to t, and to its own keys of the later steps.

    Queries, and each step's keys and values, are [rows, heads, places, head width].
    """
    places, scale = queries.shape[2], queries.shape[3] ** -0.5
    future = torch.ones(places, places, dtype=torch.bool, device=queries.device).triu(1)
    scores = (queries @ keys[0].mT).float().masked_fill(future, float("-inf"))
    own = [(queries * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1).to(values[0].dtype)
    mixed: torch.Tensor = weights[..., :places] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., places + step, None] * value
    return mixed
