"""Online distillation of a head: it learns what its target says along passages of recent text.

Knows nothing of where passages come from. Their ids suffice: the target says the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.hydra import HydraHeads
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.published import load_head, write_head
from training.heads.frozen import FrozenTarget, HiddenStates
from training.heads.recipe import DistilOptions
from training.heads.unrolled import layers_of, unrolled
from training.online import learn_along

_SCORED_AT_ONCE = 4
DEPTH = 3
"""Tokens ahead that a head of one layer learns, and chains of which are scored."""

OnlineHead = MedusaHeads | HydraHeads | PairHead


class TextPassage(Protocol):
    """Ids of a text, of which the last ones are places; see `outrider.learning.passages.Passage`."""

    @property
    def ids(self) -> npt.NDArray[np.uint32]:
        """Ids, uint32 [context + places]."""
        ...

    @property
    def places(self) -> int:
        """Number of places."""
        ...


class _Rows(NamedTuple):
    """Passages as rows of one length."""

    ids: torch.Tensor
    """int64 [rows, length]."""
    states: HiddenStates
    is_place: torch.Tensor
    """Whether a position is a place, bool [rows, length]."""


class HeadSchool:
    """A target, float32 on the CPU, and what its heads learn from it.

    Args:
        target: folder or id of the target.

    Raises OutriderError for a target that cannot be loaded, or that no head can be trained for.
    """

    def __init__(self, target: str) -> None:
        self._target = FrozenTarget.load(target, "cpu")

    def load(self, checkpoint: str) -> OnlineHead:
        """The head of a folder or id. Raises OutriderError for a head that does not fit, or cannot learn."""
        head = load_head(HeadConfig.read(checkpoint), self._target.parts)
        assert isinstance(head, OnlineHead), "the service refuses other kinds"
        return head

    def learn(
        self, head: OnlineHead, passages: Sequence[TextPassage], steps: int, rate: float, seed: int
    ) -> list[float]:
        """Takes `steps` steps of AdamW on a head's matrices; returns the loss of each, in nats per place.

        Args:
            head: the head, which is changed.
            passages: passages to learn from, at least one.
            rate: the highest learning rate; it rises over the first steps and falls to 0 at the last one.
            seed: decides the order of the passages, and the places that are scored.
        """
        learning = [one for one in head.parameters() if one.ndim > 1]
        for parameter in learning:
            parameter.requires_grad_(True)

        def loss_of(chosen: Sequence[TextPassage], step: int) -> torch.Tensor:
            return self._loss(head, chosen, seed + step)

        losses = learn_along(learning, passages, loss_of, steps, rate, seed)
        head.requires_grad_(False)
        return losses

    def accepted(
        self, heads: Mapping[int, OnlineHead], passages: Sequence[TextPassage]
    ) -> dict[int, list[int]]:
        """Sums of `right_tokens` over each passage, by the head's number."""
        return {
            number: [int(counts.sum()) for counts in found]
            for number, found in self.right_tokens(heads, passages).items()
        }

    @torch.inference_mode()
    def right_tokens(
        self, heads: Mapping[int, OnlineHead], passages: Sequence[TextPassage]
    ) -> dict[int, list[npt.NDArray[np.int64]]]:
        """The tokens that the chain from each place has right before its first error: int64 [places].

        A token is right where it is the target's likeliest one, given the text before. A chain has as many
        tokens as the head looks ahead, fewer at the passage's end. All heads, by a number of their own, read
        the same layers.
        """
        found: dict[int, list[npt.NDArray[np.int64]]] = {number: [] for number in heads}
        for low in range(0, len(passages), _SCORED_AT_ONCE):
            rows = self._rows(passages[low : low + _SCORED_AT_ONCE], next(iter(heads.values())))
            # Position i holds what the target says of position i + 1.
            said = torch.stack([self._target.parts.lm_head(row).argmax(-1) for row in rows.states.last])
            for number, head in heads.items():
                found[number] += _right(head, rows, said)
        return found

    def write(self, head: OnlineHead, folder: Path) -> None:
        """Writes a head's folder in float32, in its kind's published layout."""
        write_head(head, folder, torch.float32)

    def _loss(self, head: OnlineHead, passages: Sequence[TextPassage], seed: int) -> torch.Tensor:
        depth = _depth(head)
        loss = DistilOptions(str(head.kind), "", Path(), Path(), depth=depth).loss
        with torch.inference_mode():
            rows = self._rows(passages, head)
        # What was computed without gradients may be read by what has some only as a copy.
        last = rows.states.last.clone()
        read = None if rows.states.read is rows.states.last else rows.states.read.clone()
        # The weight of a place's prediction stands at the position before.
        weights = rows.is_place.float().roll(-1, 1)
        weights *= weights.numel() / weights.sum()
        return loss.of_batch(head, self._target, rows.ids, last, seed, weights, read)

    def _rows(self, passages: Sequence[TextPassage], head: OnlineHead) -> _Rows:
        # The rows are longer than the texts by as much as the head looks ahead from their last places.
        longest = max(len(one.ids) for one in passages) + _depth(head)
        ids = np.zeros((len(passages), longest), dtype=np.int64)
        is_place = np.zeros(ids.shape, dtype=bool)
        for row, one in enumerate(passages):
            ids[row, : len(one.ids)] = one.ids
            is_place[row, len(one.ids) - one.places : len(one.ids)] = True
        given = torch.from_numpy(ids)
        return _Rows(given, self._target.states(given, layers_of(head)), torch.from_numpy(is_place))


def _depth(head: OnlineHead) -> int:
    """Tokens that a head looks ahead."""
    return DEPTH if isinstance(head, PairHead) else len(head)


def _right(head: OnlineHead, rows: _Rows, said: torch.Tensor) -> list[npt.NDArray[np.int64]]:
    """Number of right tokens before the first error of the chain from each place, by row."""
    depth = _depth(head)
    first = int(rows.is_place.any(0).int().argmax())
    roots = torch.arange(max(0, first - 2), rows.ids.shape[1] - depth - 2)
    alive = rows.is_place[:, roots + 2]
    counts = torch.zeros(rows.ids.shape, dtype=torch.long)
    for step, (logits, _) in enumerate(unrolled(head, rows.ids, rows.states.read, depth, roots), start=1):
        places = roots + step + 1
        alive &= rows.is_place[:, places] & (logits.argmax(-1) == said[:, places - 1])
        counts[:, roots + 2] += alive
    return [row[is_place].numpy() for row, is_place in zip(counts, rows.is_place, strict=True)]
