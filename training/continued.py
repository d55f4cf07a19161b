"""Text continued by the target: a drafter is judged on the target's own text, so it trains on such text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

Unsigned = TypeVar("Unsigned", bound="np.unsignedinteger[Any]")

TEMPERATURE = 0.8
"""Sampling temperature of every second row; the other rows are greedy."""


def kept(
    teacher: LlamaForCausalLM, prompts: npt.NDArray[np.uint16], window: int, path: Path
) -> npt.NDArray[np.uint16]:
    """The prompts continued by `continue_`, kept at `path` so that an interrupted run generates them once."""
    if not path.exists():
        made = continue_(teacher, prompts, window)
        partial = path.with_suffix(".partial.npy")
        np.save(partial, made)
        os.replace(partial, path)
    loaded: npt.NDArray[np.uint16] = np.load(path)
    return loaded


@torch.inference_mode()
def continue_(teacher: PreTrainedModel, prompts: npt.NDArray[Unsigned], window: int) -> npt.NDArray[Unsigned]:
    """Prompts (shape (rows, length)) continued to `window` tokens: shape (rows, window), the same dtype."""
    generator = torch.Generator().manual_seed(int(prompts.sum()))
    cache = DynamicCache(config=teacher.config)
    ids = torch.from_numpy(prompts.astype(np.int64)).to(teacher.device)
    text = [ids]
    for _ in range(window - prompts.shape[1]):
        logits = teacher(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        ids = _next(logits, generator)
        text.append(ids)
    return torch.cat(text, dim=1).cpu().numpy().astype(prompts.dtype)


def _next(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    greedy = logits.argmax(-1, keepdim=True)
    odd = torch.arange(1, len(logits), 2)
    if not len(odd):
        return greedy
    # Drawn on the CPU, so that the text is the same function of the seed wherever the logits are.
    likely = (logits[odd] / TEMPERATURE).softmax(-1).float().cpu()
    greedy[odd] = torch.multinomial(likely, 1, generator=generator).to(greedy.device)
    return greedy
