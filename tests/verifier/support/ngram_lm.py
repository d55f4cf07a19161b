"""A target whose logits are a function of the last ids in its cache: exact, fast, and wrong if the cache is.

It keeps ids in the slots where a model keeps keys and values, and has the interface of PackedLM.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import OutcomeWants, TransferCounts
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.step_profile import StepProfile
from outrider.tokens import ChatTemplate
from speculative.digest import HostDigest

ORDER = 3
LAYOUT = KVLayout(((1, 1), (1, 1)), torch.float64, torch.device("cpu"))


class NgramOutcome:
    """What a forward returns."""

    features = None

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def digest(self, index: int) -> HostDigest:
        return HostDigest(self._rows[index])

    def rows(self) -> NDArray[np.float32]:
        return self._rows


class NgramLM:
    """Deterministic logits per (seed, last three ids)."""

    model_type = "ngram"
    name = "ngram"
    numerics = "numpy float32"
    passes = "eager"
    steps = None
    tokenizer_json: str | None = None
    chat: ChatTemplate | None = None

    def __init__(
        self,
        vocabulary_size: int = 32,
        seed: int = 0,
        max_length: int = 256,
        eos_ids: tuple[int, ...] = (),
        slots: int = 1 << 16,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.eos_ids = eos_ids
        self.sampling_defaults: dict[str, float] = {}
        self.pool = SlotPool(LAYOUT, max_slots=slots)
        self.forward_calls = 0
        self.wants = OutcomeWants()
        self.transfers = TransferCounts()
        self.batch_sizes: list[int] = []
        """Sessions in each forward."""
        self.rows: list[int] = []
        """Input tokens of each forward."""
        self.step_s = 0.0
        """How long a forward takes, so that drafts have time to come."""
        self.before_forward: Callable[[], object] = lambda: None
        self._seed = seed
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def compile_passes(self, passes: str, cache_dir: Path | None) -> None:
        """There is nothing to compile."""

    def take_profile(self) -> StepProfile | None:
        """There are no compiled passes."""
        return None

    def close(self) -> None:
        """There is nothing to end."""

    def capture_steps(self) -> None:
        """Does nothing: there are no steps of static shape."""

    def table(self, reserve: int = 0) -> SlotTable:
        table = SlotTable(self.pool, reserve)
        table.reserve(reserve)
        return table

    def release(self, table: SlotTable) -> None:
        table.close()

    def forward(self, sequences: Sequence[SequenceRows]) -> NgramOutcome:
        self.before_forward()
        time.sleep(self.step_s)
        self.forward_calls += 1
        self.batch_sizes.append(len(sequences))
        self.rows.append(sum(len(sequence.tokens) for sequence in sequences))
        self._append(sequences)
        rows = [self._row(sequence, want) for sequence in sequences for want in sequence.want]
        empty = np.empty((0, self.vocabulary_size), np.float32)
        return NgramOutcome(np.stack(rows) if rows else empty)

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """After these ids, of which the last three matter."""
        key = tuple(context[-ORDER:])
        if key not in self._known:
            generator = np.random.default_rng([self._seed, len(key), *key])
            self._known[key] = (2 * generator.standard_normal(self.vocabulary_size)).astype(np.float32)
        return self._known[key]

    @torch.inference_mode()
    def _append(self, sequences: Sequence[SequenceRows]) -> None:
        """Writes the tokens to the rows' slots, where a model writes keys and values."""
        for sequence in sequences:
            assert not sequence.table.nodes, "nothing is kept from the step before"
        plan = PassPlan(sequences, self.pool, torch.float64)
        slots = [slot for low, high in plan.written() for slot in range(low, high)]
        tokens = [token for sequence in sequences for token in sequence.tokens]
        for plane in self.pool.planes():
            plane[0, slots, 0] = torch.tensor(tokens, dtype=torch.float64)
        for rows in plan.rows:
            rows.table.parents, rows.table.depths = rows.parents, rows.depths

    def _row(self, sequence: SequenceRows, want: int) -> NDArray[np.float32]:
        table, node = sequence.table, want
        at = []
        while node >= 0 and len(at) < ORDER:
            at.append(table.length + node)
            node = table.parents[node]
        at += range(table.length - 1, max(-1, table.length - 1 - ORDER + len(at)), -1)
        slots = [table.slots(place, place + 1)[0] for place in reversed(at)]
        return self.logits(self.pool.planes()[0][0, slots, 0].long().tolist())
