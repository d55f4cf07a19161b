"""Online distillation: a drafter learns what the target said where the drafter was wrong (Liu et al., 2023).

Works on passages: ids with the target's likeliest ids at some of the last places. Knows nothing of where they
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedModel

from outrider.lm.load.model import load_model
from outrider.lm.load.source import ModelSource
from training.batches import shuffled
from training.distil import divergence_at

P = TypeVar("P")
BATCH = 8
"""Passages of one step."""
_WARMUP = 5


class TaughtPassage(Protocol):
    """Ids with what the target said at the last places; see `Passage` of the drafter service."""

    @property
    def start(self) -> int:
        """Absolute position of the first id."""
        ...

    @property
    def ids(self) -> npt.NDArray[np.uint32]:
        """Ids, uint32 [context + places]."""
        ...

    @property
    def top_ids(self) -> npt.NDArray[np.uint32]:
        """The target's likeliest ids at each place, uint32 [places, k]."""
        ...

    @property
    def top_logprobs(self) -> npt.NDArray[np.float16]:
        """Log-probabilities of the top ids, float16 [places, k]."""
        ...

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Places where the drafter was wrong, bool [places]."""
        ...


class OnlineStudent:
    """A drafter in training: float32 on the CPU.

    Only matrices learn. Norms and biases stay as they are: compiled passes hold them as constants, and a
    package compiled for the first weights has to fit all later ones.
    """

    def __init__(self, source: str) -> None:
        self.model = load_model(source, device="cpu", dtype="float32")
        self.model.set_attn_implementation("sdpa")
        self._source = source
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.ndim > 1)

    def learn(self, passages: Sequence[TaughtPassage], steps: int, rate: float, seed: int) -> list[float]:
        """Takes `steps` steps of AdamW on the wrong places; returns the loss of each in nats per place.

        Args:
            rate: the highest learning rate; it rises over the first steps and falls to 0 at the last one.
            seed: decides the order of the passages.
        """
        learning = [one for one in self.model.parameters() if one.requires_grad]
        return learn_along(learning, passages, lambda chosen, _: self._loss(chosen), steps, rate, seed)

    def write(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder: float32 weights, configuration, tokenizer."""
        self.model.save_pretrained(folder)
        source = ModelSource.of(self._source)
        AutoTokenizer.from_pretrained(source.name, **source.arguments).save_pretrained(folder)

    def accepted(self, passages: Sequence[TaughtPassage]) -> list[int]:
        """Number of places of each passage where the likeliest id is the target's likeliest one."""
        return accepted_places(self.model, passages)

    def _loss(self, passages: Sequence[TaughtPassage]) -> torch.Tensor:
        logits = torch.cat(_logits(self.model, passages))
        wrong = torch.from_numpy(np.concatenate([one.wrong for one in passages]))
        tops = np.concatenate([one.top_ids for one in passages]).astype(np.int64)
        logprobs = np.concatenate([one.top_logprobs for one in passages]).astype(np.float32)
        return divergence_at(
            logits[wrong], torch.from_numpy(tops)[wrong], torch.from_numpy(logprobs).exp()[wrong]
        ).mean()


def learn_along(
    learning: Sequence[torch.nn.Parameter],
    passages: Sequence[P],
    loss_of: Callable[[Sequence[P], int], torch.Tensor],
    steps: int,
    rate: float,
    seed: int,
) -> list[float]:
    """Takes `steps` steps of AdamW along passages; returns the loss of each.

    Args:
        learning: the parameters that learn.
        passages: passages to learn from, at least one.
        loss_of: the loss of the passages of a step, and the step's number.
        rate: the highest learning rate; it rises over the first steps and falls to 0 at the last one.
        seed: decides the order of the passages.
    """
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    losses = []
    batch = min(BATCH, len(passages))
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / _WARMUP) * (1.0 - step / steps)
        chosen = [passages[index] for index in shuffled(len(passages), batch, seed, step)]
        loss = loss_of(chosen, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.inference_mode()
def accepted_places(model: PreTrainedModel, passages: Sequence[TaughtPassage]) -> list[int]:
    """Number of places of each passage where the model's likeliest id is the target's likeliest one."""
    return [int(agreed.sum()) for agreed in agreed_places(model, passages)]


@torch.inference_mode()
def agreed_places(model: PreTrainedModel, passages: Sequence[TaughtPassage]) -> list[npt.NDArray[np.bool_]]:
    """At each place of each passage, whether the model's likeliest id is the target's: bool [places]."""
    found = []
    for low in range(0, len(passages), BATCH):
        batch = passages[low : low + BATCH]
        for logits, one in zip(_logits(model, batch), batch, strict=True):
            found.append(logits.argmax(-1).numpy() == one.top_ids[:, 0])
    return found


def _logits(model: PreTrainedModel, passages: Sequence[TaughtPassage]) -> list[torch.Tensor]:
    """Logits before each place of each passage: float32 [places, vocabulary], a tensor for each passage."""
    longest = max(len(one.ids) for one in passages) - 1
    ids = np.zeros((len(passages), longest), dtype=np.int64)
    seen, positions = np.zeros_like(ids), np.zeros_like(ids)
    for row, one in enumerate(passages):
        length = len(one.ids) - 1
        ids[row, -length:], seen[row, -length:] = one.ids[:-1], 1
        positions[row, -length:] = one.start + np.arange(length)
    places = max(len(one.wrong) for one in passages)
    # Padded on the left, so that the places stand last: logits of all rows would take gigabytes.
    kept = {"logits_to_keep": places} if "logits_to_keep" in signature(model.forward).parameters else {}
    logits: torch.Tensor = model(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(seen),
        position_ids=torch.from_numpy(positions),
        use_cache=False,
        **kept,
    ).logits
    return [logits[row, -len(one.wrong) :].float() for row, one in enumerate(passages)]


def shortened(losses: Sequence[float]) -> list[float]:
    """Mean of the first and of the last tenth of the losses; empty without losses."""
    if not losses:
        return []
    count = max(1, len(losses) // 10)
    return [sum(losses[:count]) / count, sum(losses[-count:]) / count]
