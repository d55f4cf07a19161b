"""Counts the tokens of an answer that are reasoning. Pure."""

from collections.abc import Iterable

from orchestrator.front.http.chat.families import THINK, ThoughtMarks
from orchestrator.front.http.chat.plan import Thought
from outrider.tokens import TokenTable


class ReasoningCount:
    """Counts one answer's tokens up to the one that completes the end mark; the marks' own tokens count.

    All tokens count while the end mark is missing, and none where the answer does not begin with reasoning.

    Args:
        tokens: of the model's tokenizer; None where it has none, and nothing counts.
        thought: where the answer's reasoning is.
        marks: the marks around the reasoning; special tokens count by their names.
    """

    __slots__ = ("_begin", "_begun", "_end", "_ended", "_seen", "_text", "_tokens")

    def __init__(self, tokens: TokenTable | None, thought: Thought, marks: ThoughtMarks = THINK) -> None:
        self._tokens = tokens
        self._begun = thought is Thought.OPEN
        self._ended = tokens is None or thought is Thought.NONE
        self._begin, self._end = (mark.rstrip().encode() for mark in marks)
        self._seen = 0
        self._text = b""
        """The end of the text, where a mark may still be incomplete."""

    @property
    def count(self) -> int:
        """Tokens of reasoning so far."""
        return self._seen if self._begun else 0

    def add(self, ids: Iterable[int]) -> None:
        """Counts further tokens of the answer."""
        for id_ in ids:
            if self._ended:
                return
            self._add(id_)

    def _add(self, id_: int) -> None:
        assert self._tokens is not None
        self._seen += 1
        special = id_ in self._tokens.special_ids
        self._text += self._tokens.token(id_).encode() if special else self._tokens.token_bytes(id_)
        if not self._begun:
            self._text = self._text.lstrip()
            self._begun = self._text.startswith(self._begin)
            self._ended = not self._begun and not self._begin.startswith(self._text)
        if self._begun:
            self._ended = self._end in self._text
            self._text = self._text[1 - len(self._end) :]
