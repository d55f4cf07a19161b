"""Training of the target on packed windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from training.batches import Batches
from training.loop import LossOf

MEDIUM_FROM = 0.5
LONG_FROM = 0.85
"""Shares of the budget after which windows are twice as long, and every second batch eight times as long.

Attention takes a third of a step at windows of 512, and a model learns first what needs no long window.
"""


def loss_of(model: LlamaForCausalLM, ids: npt.NDArray[np.uint16], window: int, tokens: int) -> LossOf:
    """Next-token loss on batches of about `tokens` tokens, in windows of `window` that lengthen later on."""
    short, medium, long = (
        Batches(ids, length, max(1, tokens // length), seed=1) for length in (window, 2 * window, 8 * window)
    )

    def loss(step: int, share: float) -> torch.Tensor:
        if share >= LONG_FROM and step % 2:
            return next_token_loss(model, long.at(step))
        return next_token_loss(model, (short if share < MEDIUM_FROM else medium).at(step))

    return loss


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean nats per token of a batch (int64, shape (rows, window + 1)); a float32 scalar."""
    logits = logits_of(model, batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits in float32, shape (*ids.shape, vocabulary); matrix products run in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, ids: npt.NDArray[np.uint16], window: int, count: int) -> float:
    """Mean nats per token over at most `count` windows spread evenly over `ids`."""
    starts = range(0, len(ids) - window - 1, window)
    chosen = starts[:: max(1, len(starts) // count)][:count]
    rows = [torch.from_numpy(ids[start : start + window + 1].astype(np.int64)) for start in chosen]
    losses = [float(next_token_loss(model, row[None])) for row in rows]
    return sum(losses) / len(losses)
