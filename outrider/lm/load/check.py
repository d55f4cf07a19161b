"""The check at load: the packed tree pass against the model's own eager forward.

Two sessions of random ids in one batch, longer than any sliding window: prefill in chunks, a tree with
branches, a commit that keeps a subtree, and a step on top of it. Every row is compared with the eager forward
over the ids on its path. A model that differs is refused by name rather than served wrongly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from outrider.lm.attention.interface import ATTENTION
from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import Outcome
from outrider.lm.plan import SequenceRows
from speculative.errors import ModelRefused, OutriderError

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

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

_CHUNK = 512
"""Number of rows in a pass of the prefill."""

_WHOLE = 256
"""Longest prompt, in ids, that the eager forward runs in one piece without a cache. A longer prompt runs
once, in chunks, with transformers' own cache, and every path goes on from a copy of that cache."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest accepted difference of two logits of one row, in standard deviations of that row's logits."""

_TREE = (-1, -1, 0, 0, 1, 2, 2, 4)
"""Parents in the first step's tree: the path 0, 2 is committed, nodes 5 and 6 are kept below it."""

_PATH = (0, 2)
_STEP = (-1, 0, 2)
"""Parents in the second step: a child of the last committed position, a child of the kept node 5, and a child
of this step's first row."""

_LEAVES = ((0, 3), (1, 4, 7), (0, 2, 5, 9), (0, 2, 6), (0, 2, 8, 10))
"""Every path from the prompt to a leaf, over the rows of both steps; rows of the second count from 8 on."""


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


@dataclass(frozen=True, slots=True)
class Trial:
    """Random sessions and the logits that the model's own eager forward gives for them."""

    sessions: tuple[_Session, ...]
    expected: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, lm: "PackedLM") -> "Trial":
        """Draws sessions and runs the eager forward. Raises ModelRefused if the logits are not finite."""
        _check_vocabulary(lm)
        length = _trial_length(lm)
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> list[int]:
            return torch.randint(lm.vocabulary_size, (count,), generator=generator).tolist()

        sessions = tuple(
            _Session(draw(prompt), draw(len(_TREE)), draw(len(_STEP)))
            for prompt in (length, max(2, length // 3))
        )
        try:
            with _eager(lm.model), torch.inference_mode():
                expected = tuple(_eager_logits(lm.model, session) for session in sessions)
        except Exception as error:
            raise _refusal(lm, f"its own forward fails with {type(error).__name__}: {error}") from error
        if not all(torch.isfinite(logits).all() for logits in expected):
            raise _refusal(lm, "its own forward gives logits that are not finite")
        return cls(sessions, expected)

    def verify(self, lm: Checkable) -> None:
        """Runs packed passes over the same sessions. Raises ModelRefused if any row of logits differs."""
        calls, rows = lm.forward_calls, lm.rows
        try:
            found = _packed_logits(lm, self.sessions)
        except OutriderError:
            raise
        except Exception as error:
            raise _refusal(lm, f"the packed pass fails with {type(error).__name__}: {error}") from error
        finally:
            lm.forward_calls, lm.rows = calls, rows
        for got, want in zip(found, self.expected, strict=True):
            _compare(lm, got, want)


def _check_vocabulary(lm: "PackedLM") -> None:
    weight: torch.Tensor = lm.model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = weight.shape[0]
    if rows < lm.vocabulary_size:
        raise _refusal(lm, f"it can choose among {lm.vocabulary_size} ids but embeds only {rows}")


def _trial_length(lm: "PackedLM") -> int:
    """Number of committed ids of the longer session: beyond every window within the model's context."""
    text = lm.model.config.get_text_config()
    named = [value for name in _WINDOW_FIELDS if isinstance(value := getattr(text, name, None), int)]
    windows = [window for window in (*lm.windows, *named) if 0 < window < lm.max_length]
    room = lm.max_length - len(_TREE) - 1
    return max(2, min(max([_SHORT, *(window + _BEYOND for window in windows)]), room))


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Runs the model on transformers' own eager attention while entered."""
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = ATTENTION


def _eager_logits(model: PreTrainedModel, session: _Session) -> torch.Tensor:
    """A session's logits ``[rows of both steps, vocabulary]``, from plain causal forwards over every path."""
    ids = session.tree + session.step
    rows: dict[int, torch.Tensor] = {}
    cache = _prefill(model, session.prompt) if len(session.prompt) > _WHOLE else None
    for leaf in _LEAVES:
        path = [ids[row] for row in leaf]
        if cache is None:
            output = model(input_ids=_row(model, session.prompt + path), use_cache=False)
        else:
            output = model(input_ids=_row(model, path), past_key_values=deepcopy(cache), use_cache=True)
        rows.update(zip(leaf, output.logits[0, -len(leaf) :].float().cpu(), strict=True))
    return torch.stack([rows[row] for row in range(len(ids))])


def _prefill(model: PreTrainedModel, prompt: Sequence[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for chunk in _row(model, prompt).split(_CHUNK, dim=1):
        model(input_ids=chunk, past_key_values=cache, use_cache=True)
    return cache


def _row(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


def _packed_logits(lm: Checkable, sessions: Sequence[_Session]) -> list[torch.Tensor]:
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
        trees = [SequenceRows(table, session.tree, _TREE, range(len(_TREE))) for table, session in both]
        # A copy: an outcome's rows are valid until the next pass.
        first = lm.forward(trees).rows().copy()
        for table in tables:
            table.commit(_PATH)
        steps = [SequenceRows(table, session.step, _STEP, range(len(_STEP))) for table, session in both]
        second = lm.forward(steps).rows()
    finally:
        for table in tables:
            lm.release(table)
    halves = zip(np.split(first, len(sessions)), np.split(second, len(sessions)), strict=True)
    return [torch.from_numpy(np.concatenate(half)) for half in halves]


def _compare(lm: Checkable, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.isfinite(got).all():
        raise _refusal(lm, "the packed pass gives logits that are not finite")
    spread = want.std(dim=-1, keepdim=True).clamp_min(1e-12)
    error = (got - want).abs() / spread
    allowed = _TOLERANCE[lm.model.dtype]
    worst = float(error.max())
    if worst > allowed:
        raise _refusal(
            lm,
            f"a packed tree pass differs from its own eager forward by {worst:.2g} of the logits' spread "
            f"({allowed:g} is accepted)",
        )


def _refusal(lm: Checkable, why: str) -> ModelRefused:
    return ModelRefused(f"{lm.model_type} is not served: {why}", lm.model_type)
