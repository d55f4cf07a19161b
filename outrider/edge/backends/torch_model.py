"""A Hugging Face causal language model in this process, the only backend that needs torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from outrider.edge.backends import LISTED
from outrider.edge.top_k import TopK
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest

CHUNK = 256
"""The most ids read in one pass."""
KV_MB = 256


class TorchModel:
    """A model of `outrider.lm` that reads one sequence; see `DraftModel`."""

    def __init__(self, lm: PackedLM) -> None:
        self.name = lm.name
        self.max_length = lm.max_length
        self._lm = lm
        self._table = lm.table()
        self._tokens = None if lm.tokenizer_json is None else TokenTable.from_json(lm.tokenizer_json)
        self._digest = "" if self._tokens is None else self._tokens.digest
        self.vocabulary_size = lm.vocabulary_size
        self.end_ids = frozenset(lm.eos_ids)

    @classmethod
    def load(cls, place: str, vocabulary: Path | None = None) -> Self:
        """Loads the model of a folder.

        Raises InvalidRequest where the folder has no model, ModelRefused where the model computes wrongly.
        """
        return cls(PackedLM.load(place, kv_mb=KV_MB))

    def forward(self, ids: Sequence[int]) -> TopK:
        """Reads further ids in chunks; returns the likeliest ids after the last id."""
        for start in range(0, len(ids), CHUNK):
            chunk = list(ids[start : start + CHUNK])
            last = len(chunk) - 1
            want = [last] if start + CHUNK >= len(ids) else []
            outcome = self._lm.forward([SequenceRows(self._table, chunk, list(range(-1, last)), want)])
            logits = outcome.rows()
            self._table.commit(range(len(chunk)))
        return TopK.of_row(logits[0], LISTED)

    def rewind(self, to: int) -> None:
        """Forgets all ids but the first `to`: slot i holds position i, so setting the length suffices."""
        self._table.drop_nodes()
        self._table.length = to

    def digest(self) -> str:
        """Digest of the tokenizer beside the model; empty without one."""
        return self._digest

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; see `TextModel`."""
        if self._tokens is None:
            raise InvalidRequest(f"{self.name} has no tokenizer; give the prompt as ids")
        return self._tokens.encode(text)

    def token_bytes(self, id_: int) -> bytes:
        """Bytes that an id stands for; without a tokenizer none."""
        return b"" if self._tokens is None else self._tokens.token_bytes(id_)

    def close(self) -> None:
        """Frees the sequence's memory, and ends the model's background work."""
        self._lm.release(self._table)
        self._lm.close()
