"""The check at load: the packed tree pass against the model's own eager forward.

Two sessions of random ids in one batch, longer than any sliding window: prefill in chunks, a tree with
branches, a commit that keeps a subtree, and a step on top of it. Every row is compared with the eager forward
over the ids on its path. A model that differs is refused by name rather than served wrongly.

In half precision one rounding step of a large logit is a twentieth of a row's spread, so a bound on single
logits would refuse good models of many layers. There the size of a row's whole difference decides, which is
near the logits' own size for a wrong mask, and how far the eager forward differs from itself in a batch.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import Outcome
from outrider.lm.plan import SequenceRows
from speculative.errors import ModelRefused, OutriderError

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

_WINDOW_FIELDS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "local_attention",
    "sliding_window_size",
)
_BEYOND = 6
"""Number of committed ids beyond the longest window."""

_SHORT = 24
"""Number of committed ids for a model without windows."""

_LONG = 420
"""Number of committed ids on a GPU: a kernel cuts them into several spans, of several turns each."""

_CHUNK = 512
"""Number of rows in a pass of the prefill."""

_WHOLE = 256
"""Longest prompt, in ids, that the eager forward runs in one piece without a cache. A longer prompt runs
once, in chunks, with transformers' own cache, and every path goes on from a copy of that cache."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.6}
"""Largest accepted difference of two logits of one row, in standard deviations of that row's logits."""

_ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest accepted difference of a row: its Euclidean norm over that of the row's deviations from its mean.
"""

_OWN_FACTOR = 4.0
"""Accepted multiple of the difference that the eager forward has from itself between two batches."""

_MOST_OWN = 0.05
"""Largest difference of the eager forward from itself that widens a bound: a model that differs more from
itself could not be told from one that is served wrongly."""


_MOST_ROOM, _MOST_ROOM_LOGIT = 0.4, 2.0
"""Largest differences of int8 from floats that widen the bounds of other passes over int8: rows of a wrong
mask differ by about one."""


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The two steps of a trial: parents of their rows, what is committed in between, paths to the leaves."""

    what: str
    """Name of the passes, for errors."""
    tree: tuple[int, ...]
    """Parents in the first step's tree."""
    path: tuple[int, ...]
    """Nodes of the first step that are committed."""
    step: tuple[int, ...]
    """Parents in the second step: nodes that were kept come first."""
    leaves: tuple[tuple[int, ...], ...]
    """Every path from the prompt to a leaf, over the rows of both steps."""
    least: int = _SHORT
    """Least number of committed ids of the longer session."""
    whole: int = _WHOLE
    """Longest prompt that the eager forward runs in one piece without a cache."""


TREES = TrialShape(
    "a packed tree pass",
    (-1, -1, 0, 0, 1, 2, 2, 4),
    (0, 2),  # nodes 5 and 6 are kept below it
    (-1, 0, 2),  # below the last committed position, the kept node 5, and this step's first row
    ((0, 3), (1, 4, 7), (0, 2, 5, 9), (0, 2, 6), (0, 2, 8, 10)),
)
"""Steps with branches, and a kept subtree."""

CHAINS = TrialShape(
    "a pass of chains",
    tuple(range(-1, 7)),
    (0, 1, 2),
    (-1, 0, 1),
    (tuple(range(8)), (0, 1, 2, 8, 9, 10)),
    least=76,
    whole=2**31,
)
"""Steps of one chain, of which some is accepted. The prompt's chunks end between block borders."""


class Checkable(Protocol):
    """The part of a PackedLM that the check uses, once the eager logits are known."""

    model: PreTrainedModel
    model_type: str
    forward_calls: int
    rows: int

    def table(self) -> SlotTable:
        """A slot table for a new session."""
        ...

    def release(self, table: SlotTable) -> None:
        """Returns the slots of a session's table."""
        ...

    def forward(self, sequences: Sequence[SequenceRows]) -> Outcome:
        """One pass over the rows of all sessions."""
        ...


@dataclass(frozen=True, slots=True)
class _Session:
    prompt: list[int]
    tree: list[int]
    step: list[int]


class Difference(NamedTuple):
    """How far logits are from the expected ones; the worst of all rows."""

    logit: float
    """Largest difference of two logits, in standard deviations of their row's logits."""
    row: float
    """Largest difference of a row, relative as `_ROW_TOLERANCE` says."""

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> "Difference":
        """The difference of ``got`` from ``want``, both ``[rows, vocabulary]``."""
        spread = want.std(dim=-1, keepdim=True).clamp_min(1e-12)
        off = (want - want.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
        row = (got - want).norm(dim=-1) / off
        return cls(float(((got - want).abs() / spread).max()), float(row.max()))

    @classmethod
    def worst_of(cls, got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> "Difference":
        """The worst difference of sessions' logits from those expected of the same sessions."""
        worst = _NONE
        for ours, theirs in zip(got, want, strict=True):
            worst = worst.worse(cls.of(ours, theirs))
        return worst

    def worse(self, other: "Difference") -> "Difference":
        """The larger of two differences, each figure by itself."""
        return Difference(max(self.logit, other.logit), max(self.row, other.row))


_NONE = Difference(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Random sessions and the logits that the model's own eager forward gives for them."""

    sessions: tuple[_Session, ...]
    expected: tuple[torch.Tensor, ...]
    own: float
    """How far rows of the eager forward differ from themselves when another sequence is computed beside them;
    as `Difference.row`."""
    shape: TrialShape = TREES
    room: Difference = _NONE
    """Difference that is accepted whatever the model's dtype."""
    against: str = "its own eager forward"
    """What gave the expected logits, for errors and logs."""

    @classmethod
    def of(cls, lm: "PackedLM", shape: TrialShape = TREES) -> "Trial":
        """Draws sessions and runs the eager forward. Raises ModelRefused if the logits are not finite."""
        _check_vocabulary(lm)
        length = _trial_length(lm, shape)
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> list[int]:
            return torch.randint(lm.vocabulary_size, (count,), generator=generator).tolist()

        sessions = tuple(
            _Session(draw(prompt), draw(len(shape.tree)), draw(len(shape.step)))
            for prompt in (length, max(2, length // 3))
        )
        try:
            with _eager(lm.model), torch.inference_mode():
                expected = tuple(_eager_logits(lm.model, session, shape) for session in sessions)
                own = _own_difference(lm.model, sessions[-1]) if lm.model.dtype.itemsize < 4 else 0.0
        except Exception as error:
            raise _refusal(lm, f"its own forward fails with {type(error).__name__}: {error}") from error
        if not all(torch.isfinite(logits).all() for logits in expected):
            raise _refusal(lm, "its own forward gives logits that are not finite")
        return cls(sessions, expected, own, shape)

    def over_int8(self, lm: "PackedLM") -> "Trial":
        """The same sessions for a model that keeps int8 now; its ragged passes give the expected logits.

        The last bit of a number may decide between two codes. So other passes may differ from these by as
        much as these differ from passes over floats. Raises ModelRefused where they fail.
        """
        found = self._logits_of(lm)
        room = Difference.worst_of(found, self.expected)
        room = Difference(min(room.logit, _MOST_ROOM_LOGIT), min(room.row, _MOST_ROOM))
        return replace(self, expected=tuple(found), room=room, against="ragged passes over int8")

    def verify(self, lm: Checkable) -> None:
        """Runs packed passes over the same sessions. Raises ModelRefused if any row of logits differs."""
        found = self._logits_of(lm)
        if not all(torch.isfinite(logits).all() for logits in found):
            raise _refusal(lm, f"{self.shape.what} gives logits that are not finite")
        self._judge(lm, Difference.worst_of(found, self.expected))

    def _logits_of(self, lm: Checkable) -> list[torch.Tensor]:
        """Logits of the sessions by the packed passes of ``lm``. Raises ModelRefused where they fail."""
        calls, rows = lm.forward_calls, lm.rows
        try:
            return _packed_logits(lm, self.sessions, self.shape)
        except OutriderError:
            raise
        except Exception as error:
            raise _refusal(lm, f"{self.shape.what} fails with {type(error).__name__}: {error}") from error
        finally:
            lm.forward_calls, lm.rows = calls, rows

    def _judge(self, lm: Checkable, worst: Difference) -> None:
        """Logs the worst difference. Raises ModelRefused where it is too large."""
        dtype = lm.model.dtype
        allowed = max(_ROW_TOLERANCE[dtype], _OWN_FACTOR * min(self.own, _MOST_OWN), self.room.row)
        allowed_logit = max(_TOLERANCE[dtype], self.room.logit)
        fields = {
            "row": worst.row,
            "row_accepted": allowed,
            "logit": worst.logit,
            "logit_accepted": allowed_logit,
            "own": self.own,
        }
        log.info("packed passes differ from %s by", self.against, extra={"fields": fields})
        if worst.row > allowed or worst.logit > allowed_logit:
            raise _refusal(
                lm,
                f"{self.shape.what} differs from {self.against} by {worst.logit:.2g} of the logits' "
                f"spread ({allowed_logit:g} is accepted) and by {worst.row:.2g} of a row ({allowed:.2g})",
            )


def _check_vocabulary(lm: "PackedLM") -> None:
    weight: torch.Tensor = lm.model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = weight.shape[0]
    if rows < lm.vocabulary_size:
        raise _refusal(lm, f"it can choose among {lm.vocabulary_size} ids but embeds only {rows}")


def _trial_length(lm: "PackedLM", shape: TrialShape) -> int:
    """Number of committed ids of the longer session: beyond every window within the model's context."""
    text = lm.model.config.get_text_config()
    named = [value for name in _WINDOW_FIELDS if isinstance(value := getattr(text, name, None), int)]
    windows = [window for window in (*lm.windows, *named) if 0 < window < lm.max_length]
    room = lm.max_length - len(shape.tree) - 1
    least = shape.least if lm.pool.layout.device.type == "cpu" else _LONG
    return max(2, min(max([least, *(window + _BEYOND for window in windows)]), room))


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Runs the model on transformers' own eager attention while entered."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _eager_logits(model: PreTrainedModel, session: _Session, shape: TrialShape) -> torch.Tensor:
    """A session's logits ``[rows of both steps, vocabulary]``, from plain causal forwards over every path."""
    ids = session.tree + session.step
    rows: dict[int, torch.Tensor] = {}
    cache = _prefill(model, session.prompt) if len(session.prompt) > shape.whole else None
    for leaf in shape.leaves:
        path = [ids[row] for row in leaf]
        if cache is None:
            output = model(input_ids=_row(model, session.prompt + path), use_cache=False)
        else:
            output = model(input_ids=_row(model, path), past_key_values=deepcopy(cache), use_cache=True)
        rows.update(zip(leaf, output.logits[0, -len(leaf) :].float().cpu(), strict=True))
    return torch.stack([rows[row] for row in range(len(ids))])


def _own_difference(model: PreTrainedModel, session: _Session) -> float:
    """How far a row of the eager forward differs from the same row computed beside another sequence."""
    ids = session.prompt + session.tree
    other = ids[::-1]
    alone = model(input_ids=_row(model, ids), use_cache=False).logits[0].float()
    both = model(input_ids=torch.tensor([ids, other], device=model.device), use_cache=False).logits[0].float()
    return Difference.of(both, alone).row


def _prefill(model: PreTrainedModel, prompt: Sequence[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for chunk in _row(model, prompt).split(_CHUNK, dim=1):
        model(input_ids=chunk, past_key_values=cache, use_cache=True)
    return cache


def _row(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


def _packed_logits(lm: Checkable, sessions: Sequence[_Session], shape: TrialShape) -> list[torch.Tensor]:
    tables = [lm.table() for _ in sessions]
    try:
        longest = max(len(session.prompt) for session in sessions)
        size = min(_CHUNK, longest // 2 + 1)
        for start in range(0, longest, size):
            chunks = [session.prompt[start : start + size] for session in sessions]
            live = [(table, chunk) for table, chunk in zip(tables, chunks, strict=True) if chunk]
            lm.forward([SequenceRows(table, chunk, range(-1, len(chunk) - 1), ()) for table, chunk in live])
            for table, chunk in live:
                table.commit(range(len(chunk)))
        both = list(zip(tables, sessions, strict=True))
        trees = [
            SequenceRows(table, session.tree, shape.tree, range(len(shape.tree))) for table, session in both
        ]
        # A copy: an outcome's rows are valid until the next pass.
        first = lm.forward(trees).rows().copy()
        for table in tables:
            table.commit(shape.path)
        steps = [
            SequenceRows(table, session.step, shape.step, range(len(shape.step))) for table, session in both
        ]
        second = lm.forward(steps).rows()
    finally:
        for table in tables:
            lm.release(table)
    halves = zip(np.split(first, len(sessions)), np.split(second, len(sessions)), strict=True)
    return [torch.from_numpy(np.concatenate(half)) for half in halves]


def _refusal(lm: Checkable, why: str) -> ModelRefused:
    return ModelRefused(f"{lm.model_type} is not served: {why}", lm.model_type)
