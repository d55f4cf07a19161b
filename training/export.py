"""Writes model folders aside, then swaps each in whole, so that no process ever loads half a model."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from training import tokenizer as bpe

CARD = "README.md"
"""Name of a folder's model card."""
SHARD = "12MB"
"""Largest weights file; repositories and their hosts dislike larger ones."""


def write(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face folder: weights in bfloat16, configuration, tokenizer."""
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id, do_sample=False)
    stored.save_pretrained(folder, max_shard_size=SHARD)
    bpe.save(tokenizer, folder, model.config.max_position_embeddings)
    for file in folder.iterdir():
        file.chmod(0o644)


def publish(staged: Path, folder: Path) -> None:
    """Makes `folder` a copy of `staged`, which keeps an earlier card (README.md) if it has none of its own.

    Where `folder` is a link to a folder, what it leads to is replaced, and the link stays.
    """
    folder = folder.resolve()
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    if old.exists() and not folder.exists():  # a process died between the two renames below
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(staged, partial)
    card = folder / CARD
    if card.exists() and not (partial / CARD).exists():
        shutil.copy2(card, partial)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
