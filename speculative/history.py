"""The ids before the token to choose, counted as penalties need them; knows nothing of logits."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CountedIds(NamedTuple):
    """What penalties count, as a kernel reads it: int64 and float64 numbers in memory.

    The arrays are the history's own, and may grow once a further id is committed.
    """

    seen: "array[int]"
    """The distinct ids of prompt and output, without those of the path."""
    generated: "array[int]"
    """The distinct ids of the output, without those of the path."""
    counts: "array[float]"
    """The number of times that each of `generated` occurs."""
    path: "array[int]"
    """The tokens of the path, as they come."""


class History:
    """The ids before the token to choose, with prompt and output kept apart.

    Counting waits until a penalty asks, so that requests without penalties pay for a list append only.
    """

    __slots__ = ("_length", "_path", "_tally")

    def __init__(self, tally: "_Tally", path: tuple[int, ...] = ()) -> None:
        self._tally = tally
        self._path = path
        self._length = len(tally.ids)

    @classmethod
    def of(cls, ids: Sequence[int], prompt_length: int) -> "History":
        """The history after `ids`, of which the first `prompt_length` are the prompt."""
        return cls(_Tally(list(ids), prompt_length))

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds committed ids. Not for a history that `with_path` returned; those are invalid afterwards."""
        assert not self._path, f"ids {tokens} were added to a drafted path"
        self._tally.ids.extend(tokens)
        self._length += len(tokens)

    def with_path(self, tokens: Iterable[int]) -> "History":
        """The history at a tree node: this history, with the tokens of the path to the node as output."""
        return History(self._tally, (*self._path, *tokens))

    @property
    def generated_count(self) -> int:
        """Number of ids in the output."""
        self._check_valid()
        return self._length - self._tally.prompt_length + len(self._path)

    def seen(self) -> NDArray[np.int64]:
        """The distinct ids of prompt and output: int64[n]."""
        self._check_valid()
        base, known = self._tally.seen()
        new = [token for token in dict.fromkeys(self._path) if token not in known]
        return np.concatenate([base, np.array(new, dtype=np.int64)]) if new else base

    def generated(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The distinct ids of the output and the number of times that each occurs: int64[n], float64[n]."""
        self._check_valid()
        ids, counts, slots = self._tally.generated()
        if not self._path:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in self._path:
            slot = slots.get(token)
            if slot is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[slot] += 1
        new_ids = np.array(list(new), dtype=np.int64)
        new_counts = np.array(list(new.values()), dtype=np.float64)
        return np.concatenate([ids, new_ids]), np.concatenate([counts, new_counts])

    def counted(self) -> CountedIds:
        """The ids that penalties count; costs nothing but the counting of ids that are new."""
        self._check_valid()
        return CountedIds(*self._tally.counted(), array("q", self._path))

    def _check_valid(self) -> None:
        committed = len(self._tally.ids)
        assert self._length == committed, (
            f"a path below id {self._length - 1} was used after id {committed - 1}"
        )


class _Tally:
    """Counts over committed ids, brought up to date when they are read."""

    __slots__ = (
        "_counted",
        "_counts",
        "_generated",
        "_read",
        "_seen",
        "_seen_ids",
        "_slots",
        "ids",
        "prompt_length",
    )

    def __init__(self, ids: list[int], prompt_length: int) -> None:
        self.ids = ids
        self.prompt_length = prompt_length
        self._counted = 0
        self._seen: dict[int, None] = {}
        self._slots: dict[int, int] = {}
        """Place of each id of the output in `_generated` and `_counts`."""
        self._seen_ids = array("q")
        self._generated = array("q")
        self._counts = array("d")
        self._read = -1, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        """Copies of the three arrays, and the number of ids that they count."""

    def seen(self) -> tuple[NDArray[np.int64], dict[int, None]]:
        return self._copies()[1], self._seen

    def generated(self) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[int, int]]:
        return *self._copies()[2:], self._slots

    def counted(self) -> "tuple[array[int], array[int], array[float]]":
        self._catch_up()
        return self._seen_ids, self._generated, self._counts

    def _copies(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Copies, since an array does not grow while NumPy looks at its memory."""
        self._catch_up()
        if self._read[0] != self._counted:
            seen, generated = np.array(self._seen_ids, np.int64), np.array(self._generated, np.int64)
            self._read = self._counted, seen, generated, np.array(self._counts, np.float64)
        return self._read

    def _catch_up(self) -> None:
        for position in range(self._counted, len(self.ids)):
            token = self.ids[position]
            if token not in self._seen:
                self._seen[token] = None
                self._seen_ids.append(token)
            if position >= self.prompt_length:
                slot = self._slots.setdefault(token, len(self._slots))
                if slot == len(self._counts):
                    self._generated.append(token)
                    self._counts.append(0.0)
                self._counts[slot] += 1
        self._counted = len(self.ids)
