"""Passes of two models over the same rows: an expert, and an amateur that the expert is contrasted with.

The amateur's keys and values lie in the same blocks and slots as the expert's, in storage of its own. So the
expert's tables, shared prefixes, evictions and copies hold for both, without a second account.
"""

from collections.abc import Sequence

import torch

from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import Outcome
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.contrast import Contrast, contrasted
from speculative.digest import HostDigest, Row, RowDigest


class ContrastingLM:
    """Runs the expert over all sequences, and the amateur over those that contrast.

    A sequence that contrasts must do so in all of its passes, as must the sequences whose blocks it shares:
    the amateur computes no other rows.

    Args:
        expert: the target, on a CPU: a GPU may put copies of slots off, which are not followed here.
        amateur: a model of the same token ids, on a CPU; from now on used here alone.
    """

    def __init__(self, expert: PackedLM, amateur: PackedLM) -> None:
        self.expert = expert
        self.amateur = amateur
        self.pool = expert.pool
        self.vocabulary_size = expert.vocabulary_size
        """Width of the logits."""
        expert.pool.grown = self._grow
        expert.pool.copied = amateur.pool.copy
        self._grow(expert.pool.blocks.capacity)

    def forward(self, sequences: Sequence[SequenceRows]) -> "Outcome | ContrastedOutcome":
        """One pass of the expert, and one of the amateur where sequences contrast; see `PackedLM.forward`."""
        before = [(sequence.table.length, tuple(sequence.table.parents)) for sequence in sequences]
        outcome = self.expert.forward(sequences)
        rows: list[SequenceRows] = []
        contrasts: dict[int, tuple[int, Contrast]] = {}
        first = below = 0
        for sequence, (length, parents) in zip(sequences, before, strict=True):
            if sequence.contrast is not None:
                for at in range(len(sequence.want)):
                    contrasts[first + at] = (below + at, sequence.contrast)
                below += len(sequence.want)
                rows.append(self._mirrored(sequence, length, parents))
            first += len(sequence.want)
        if not rows:
            return outcome
        return ContrastedOutcome(outcome, self.amateur.forward(rows), contrasts)

    def _mirrored(self, sequence: SequenceRows, length: int, parents: Sequence[int]) -> SequenceRows:
        """The sequence's rows over the same slots of the amateur's pool."""
        table = SlotTable.at(self.amateur.pool, sequence.table.all_runs, length, parents)
        known = self.amateur.vocabulary_size
        # A drafted id that the amateur does not know is never accepted, whatever is computed behind it.
        tokens = [token if token < known else 0 for token in sequence.tokens]
        return SequenceRows(table, tokens, sequence.parents, sequence.want)

    def _grow(self, blocks: int) -> None:
        if blocks > self.amateur.pool.blocks.capacity:
            self.amateur.pool.grow(blocks)


class ContrastedOutcome:
    """The outcome of the expert's pass, in which some rows are contrasted with the amateur's.

    Args:
        expert: outcome of the expert's pass.
        amateur: outcome of the amateur's pass.
        contrasts: by index of a wanted row of the expert's: the index of the amateur's row, and how.
    """

    def __init__(self, expert: Outcome, amateur: Outcome, contrasts: dict[int, tuple[int, Contrast]]) -> None:
        self._expert = expert
        self._amateur = amateur
        self._contrasts = contrasts
        self._made: dict[int, Row] = {}
        self.features: torch.Tensor | None = expert.features
        """Hidden states of the expert."""

    def digest(self, index: int) -> RowDigest:
        """What of one wanted row suffices to choose its token."""
        if index not in self._contrasts:
            return self._expert.digest(index)
        made = self._made.get(index)
        if made is None:
            row, contrast = self._contrasts[index]
            made = contrasted(self._expert.row(index), self._amateur.row(row), contrast)
            self._made[index] = made
        return HostDigest(made)
