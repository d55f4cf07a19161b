"""Text continued by the target: a drafter is judged on the target's own text, so it trains on such text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaForCausalLM

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
def continue_(
    teacher: LlamaForCausalLM, prompts: npt.NDArray[np.uint16], window: int
) -> npt.NDArray[np.uint16]:
    """Prompts (uint16, shape (rows, length)) continued to `window` tokens: uint16, shape (rows, window)."""
    generator = torch.Generator().manual_seed(int(prompts.sum()))
    cache = DynamicCache(config=teacher.config)
    ids = torch.from_numpy(prompts.astype(np.int64))
    text = [ids]
    for _ in range(window - prompts.shape[1]):
        logits = teacher(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        ids = _next(logits, generator)
        text.append(ids)
    return torch.cat(text, dim=1).numpy().astype(np.uint16)


def _next(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    greedy = logits.argmax(-1, keepdim=True)
    sampled = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
    odd = torch.arange(len(logits))[:, None] % 2 == 1
    return torch.where(odd, sampled, greedy)
