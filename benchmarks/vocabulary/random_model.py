"""A small Llama with random weights, a vocabulary of any size, and a head whose sharpness is chosen.

A step of this model takes about a millisecond, so what a token costs outside the model shows. Its tokenizer
knows every byte, and names as many further ids as the vocabulary has.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

LAYERS, HIDDEN = 4, 64
PEAKED_NUCLEUS = 45
"""Median number of ids in the nucleus of a peaked head."""
PROBED = 256
"""Rows whose nucleus is counted."""
END = "<eos>"


class Nucleus(NamedTuple):
    """Number of ids in the nucleus of many rows: the median, and what a tenth lies below and above."""

    low: int
    median: int
    high: int


def save_random_llama(
    folder: Path, vocabulary: int, peaked: bool, temperature: float, top_p: float
) -> Nucleus:
    """Saves a random Llama with its tokenizer; returns the nuclei of its rows at `temperature` and `top_p`.

    A flat head gives every id nearly the same probability. A peaked head is scaled until the median nucleus
    has PEAKED_NUCLEUS ids.
    """
    model = random_llama(vocabulary)
    rows = probe_logits(model)
    if peaked:
        scale = scale_for(rows, temperature, top_p)
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        rows *= scale
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer_of_size(vocabulary).save_pretrained(folder)
    return nucleus_of(rows, temperature, top_p)


def random_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama of LAYERS layers that are HIDDEN wide, with the same weights each time."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.float()
    model.eval()
    model.requires_grad_(False)
    return model


def probe_logits(model: LlamaForCausalLM) -> NDArray[np.float64]:
    """Logits after each of PROBED random ids, float64[PROBED, V]; a flat model's differ little."""
    ids = torch.randint(model.config.vocab_size, (1, PROBED), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(ids).logits[0].numpy()
    return logits.astype(np.float64)


def nucleus_of(rows: NDArray[np.float64], temperature: float, top_p: float) -> Nucleus:
    """How many ids top-p keeps of each of these rows of logits."""
    sizes = sorted(_nucleus(row / temperature, top_p) for row in rows)
    tenth = len(sizes) // 10
    return Nucleus(sizes[tenth], sizes[len(sizes) // 2], sizes[-1 - tenth])


def scale_for(rows: NDArray[np.float64], temperature: float, top_p: float) -> float:
    """The factor of these logits at which the median nucleus has PEAKED_NUCLEUS ids, within a few."""
    low, high = 0.0, 1000.0
    some = rows[:: len(rows) // 32]
    for _ in range(16):
        middle = (low + high) / 2
        if nucleus_of(some * middle, temperature, top_p).median > PEAKED_NUCLEUS:
            low = middle
        else:
            high = middle
    return high


def tokenizer_of_size(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of exactly `size` ids: an end id, all bytes, and strings of more bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    lefts = list(letters)
    for left in lefts:
        for right in letters:
            if 1 + len(letters) + len(merges) == size:
                break
            merges.append((left, right))
            lefts.append(left + right)
        else:
            continue
        break
    names = [END, *letters, *[left + right for left, right in merges]]
    tokenizer = Tokenizer(models.BPE({name: id_ for id_, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def _nucleus(scores: NDArray[np.float64], top_p: float) -> int:
    descending = np.sort(np.exp(scores - scores.max()))[::-1]
    sums = np.cumsum(descending)
    return int(np.searchsorted(sums, top_p * sums[-1])) + 1
