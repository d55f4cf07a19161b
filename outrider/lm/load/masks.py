"""The mask ids of a drafter that writes blocks: the last ids of its vocabulary, which are no tokens.

The model's `config.json` says how many there are, so such a model is a Hugging Face folder like any other,
and still drafts token by token with a drafter of kind causal_lm.
"""

from typing import Any

from transformers import PretrainedConfig

_FIELD = "outrider_masks"


def mask_ids(config: PretrainedConfig, vocabulary_size: int) -> range:
    """The mask ids in order of place; empty for a model that has none."""
    count = getattr(config, _FIELD, 0)
    known = isinstance(count, int) and 0 < count < vocabulary_size
    return range(vocabulary_size - count, vocabulary_size) if known else range(0)


def note_masks(config: Any, count: int) -> None:
    """Notes in a model's configuration that the last `count` ids of its vocabulary are masks."""
    setattr(config, _FIELD, count)
