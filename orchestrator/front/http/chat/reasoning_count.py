"""Counts the tokens of an answer that are reasoning. Pure."""

from collections.abc import Iterable

from orchestrator.front.http.chat.families import THOUGHT_BEGIN, THOUGHT_END
from orchestrator.front.http.chat.plan import Thought
from outrider.tokens import TokenTable

_BEGIN, _END = THOUGHT_BEGIN.encode(), THOUGHT_END.encode()


class ReasoningCount:
    """Counts one answer's tokens up to the one that completes the end mark; the marks' own tokens count.

    All tokens count while the end mark is missing, and none where the answer does not begin with reasoning.

    Args:
        tokens: of the model's tokenizer; None where it has none, and nothing counts.
        thought: where the answer's reasoning is.
    """

    __slots__ = ("_begun", "_ended", "_seen", "_text", "_tokens")

    def __init__(self, tokens: TokenTable | None, thought: Thought) -> None:
        self._tokens = tokens
        self._begun = thought is Thought.OPEN
        self._ended = tokens is None or thought is Thought.NONE
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
        self._text += self._tokens.token_bytes(id_)
        if not self._begun:
            self._text = self._text.lstrip()
            self._begun = self._text.startswith(_BEGIN)
            self._ended = not self._begun and not _BEGIN.startswith(self._text)
        if self._begun:
            self._ended = _END in self._text
            self._text = self._text[1 - len(_END) :]
