"""A target whose logits are a function of the last ids in its cache: exact, fast, and wrong if the cache is.

It keeps ids where a model keeps keys and values and has the interface of PackedLM.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER = 3


@dataclass(eq=False)
class NgramTable:
    """Committed ids, and drafted rows as (token, parent)."""

    reserve: int
    ids: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        return len(self.ids)

    def commit(self, path: Sequence[int]) -> list[int]:
        above = -1
        for node in path:
            assert self.nodes[node][1] == above, "a committed path is a chain"
            self.ids.append(self.nodes[node][0])
            above = node
        assert len(self.ids) <= self.reserve
        self.nodes = []
        return []

    def drop_nodes(self) -> None:
        self.nodes = []

    def context(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            token, node = self.nodes[node]
            path.append(token)
        return (self.ids + path[::-1])[-ORDER:]


class NgramLogits:
    """What a forward returns."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def numpy(self) -> NDArray[np.float32]:
        return self._rows


class NgramPool:
    """Counts what tables reserve."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.used_slots = 0


class NgramLM:
    """Deterministic logits per (seed, last three ids)."""

    model_type = "ngram"
    name = "ngram"
    tokenizer_json: str | None = None

    def __init__(
        self, vocabulary_size: int = 32, seed: int = 0, max_length: int = 256, eos_ids: tuple[int, ...] = ()
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.eos_ids = eos_ids
        self.pool = NgramPool(1 << 16)
        self.forward_calls = 0
        self.shares: list[int] = []
        """Sessions in each forward."""
        self.rows: list[int] = []
        """Input tokens of each forward."""
        self.step_s = 0.0
        """How long a forward takes, so that drafts have time to come."""
        self.before_forward: Callable[[], None] = lambda: None
        self._seed = seed
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def table(self, reserve: int = 0) -> NgramTable:
        self.pool.used_slots += reserve
        return NgramTable(reserve)

    def release(self, table: NgramTable) -> None:
        assert not table.closed, "a table is released once"
        table.closed = True
        self.pool.used_slots -= table.reserve

    def forward(self, shares: Sequence[Any]) -> NgramLogits:
        self.before_forward()
        time.sleep(self.step_s)
        self.forward_calls += 1
        self.shares.append(len(shares))
        self.rows.append(sum(len(share.tokens) for share in shares))
        rows = [self._row(share, want) for share in self._append(shares) for want in share.want]
        empty = np.empty((0, self.vocabulary_size), np.float32)
        return NgramLogits(np.stack(rows) if rows else empty)

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """After these ids, of which the last three matter."""
        key = tuple(context[-ORDER:])
        if key not in self._known:
            generator = np.random.default_rng([self._seed, len(key), *key])
            self._known[key] = (2 * generator.standard_normal(self.vocabulary_size)).astype(np.float32)
        return self._known[key]

    def _append(self, shares: Sequence[Any]) -> Sequence[Any]:
        for share in shares:
            table = share.table
            assert not table.closed, "a released table is not used"
            assert not table.nodes, "nothing is kept from the step before"
            assert len(share.tokens) == len(share.parents) > 0
            table.nodes.extend(zip(share.tokens, share.parents, strict=True))
            assert table.length + len(table.nodes) <= table.reserve, "a session keeps to its slots"
        return shares

    def _row(self, share: Any, want: int) -> NDArray[np.float32]:
        return self.logits(share.table.context(want))
