"""A small language model that learns to draft for the target: DistillSpec (Zhou et al., 2024) on any pair."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from outrider.lm.load.masks import mask_ids
from outrider.lm.load.model import load_model, longest_context
from outrider.lm.load.source import ModelSource
from speculative.errors import InvalidRequest
from training.heads.frozen import FrozenTarget


def check_width(flag: str, source: str, target: FrozenTarget) -> None:
    """Reads a model's configuration. Raises InvalidRequest where it has not as many logits as the target.

    Args:
        flag: the flag that names the model.
    """
    config = _config(source)
    size, wanted = config.get_text_config().vocab_size, target.parts.shape.vocabulary_size
    if size == wanted:
        return
    masks = len(mask_ids(config, size))
    hint = f", since its last {masks} ids are masks: give the model that it was trained from" if masks else ""
    raise InvalidRequest(f"{flag} {source!r} has {size} logits, and the target has {wanted}{hint}")


def context_of(source: str) -> int:
    """The most tokens that a model can read, as its configuration says. Raises ModelRefused without one."""
    return longest_context(_config(source))


def _config(source: str) -> PreTrainedConfig:
    where = ModelSource.of(source)
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        where.name, trust_remote_code=False, **where.arguments
    )
    return config


class SmallLM(torch.nn.Module):
    """A causal language model with the target's tokenizer, in float32.

    Args:
        source: folder or id of the model to begin with.
        model: the model.
    """

    kind: ClassVar[str] = "lm"

    def __init__(self, source: str, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._source = source

    @classmethod
    def load(cls, source: str, target: FrozenTarget) -> SmallLM:
        """Loads a model to be trained. Raises OutriderError where it cannot draft for the target."""
        model = load_model(source, device=str(target.device), dtype="float32")
        model.set_attn_implementation("sdpa")
        FrozenTarget(model)  # refuses a model whose parts cannot be found
        return cls(source, model.requires_grad_(True))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm: ids int64 [rows, length] to [rows, length, width]."""
        found: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states: [..., width] to [..., vocabulary]."""
        lm_head = self.model.get_output_embeddings()
        assert lm_head is not None, "FrozenTarget has checked it"
        found: torch.Tensor = lm_head(hidden)
        return found

    def write(self, folder: Path) -> None:
        """Writes a Hugging Face folder: weights in bfloat16, configuration, tokenizer."""
        copy.deepcopy(self.model).bfloat16().save_pretrained(folder)
        source = ModelSource.of(self._source)
        AutoTokenizer.from_pretrained(source.name, **source.arguments).save_pretrained(folder)
