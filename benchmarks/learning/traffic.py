"""The traffic of learning drafters: code, prose, and what the target says to it."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.shared.heldout import held_out_records, tokenizer_of
from drafter_service.learning.service import TOPS
from outrider.learning.cuts import CONTEXT, PLACES
from outrider.learning.passages import Passage

BATCH = 16
"""Prompts that the target answers at once."""


def code_prompts(model: str, count: int) -> NDArray[np.int64]:
    """Held-out code, int64 [count, CONTEXT]."""
    texts = [record["prompt"] + record["continuation"] for record in held_out_records(10**6)]
    return _cut(model, texts, count)


def prose_prompts(model: str, count: int) -> NDArray[np.int64]:
    """The reference manual of Python, which the recipe of the embedded pair leaves out: [count, CONTEXT]."""
    return _cut(model, [topics[name] for name in sorted(topics)], count)


def _cut(model: str, texts: list[str], count: int) -> NDArray[np.int64]:
    """Prompts that share no text: first the first of every text, then the second, and so on."""
    encoded = [tokenizer_of(model).encode(text).ids for text in texts]
    pieces = [
        ids[low : low + CONTEXT]
        for low in range(0, 20 * CONTEXT, CONTEXT)
        for ids in encoded
        if len(ids) >= low + CONTEXT
    ]
    if len(pieces) < count:
        raise SystemExit(f"there are {len(pieces)} prompts of {CONTEXT} tokens, and {count} are wanted")
    return np.array(pieces[:count])


@torch.inference_mode()
def told(target: PreTrainedModel, prompts: NDArray[np.int64], first: int) -> Iterator[Passage]:
    """The target's own greedy text after each prompt, with its likeliest ids at each place."""
    for low in range(0, len(prompts), BATCH):
        ids = target.generate(  # type: ignore[operator]
            torch.from_numpy(prompts[low : low + BATCH]),
            attention_mask=torch.ones(len(prompts[low : low + BATCH]), CONTEXT, dtype=torch.int64),
            do_sample=False,
            min_new_tokens=PLACES,
            max_new_tokens=PLACES,
        )
        tops = target(input_ids=ids, logits_to_keep=PLACES + 1).logits[:, :-1].log_softmax(-1).topk(TOPS)
        for row in range(len(ids)):
            yield Passage(
                "",
                first + low + row,
                0,
                ids[row].numpy().astype(np.uint32),
                tops.indices[row].numpy().astype(np.uint32),
                tops.values[row].numpy().astype(np.float16),
                np.ones(PLACES, dtype=bool),
            )
