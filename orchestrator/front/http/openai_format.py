"""Formats pieces of answers as OpenAI's text and chat completions. Pure."""

from collections.abc import Sequence, Set
from typing import Any, Protocol

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.chat.message import ChatMessage
from orchestrator.front.http.chat.plan import ChatPlan
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2

_PLAIN = ChatPlan()
LEAST = -9999.0
"""Stands for a probability of 0, which JSON has no logarithm of."""


class CompletionFormat(Protocol):
    """The format of one kind of completion."""

    whole_object: str
    """The value of `object` in a whole answer."""
    chunk_object: str
    """The value of `object` in an event of a stream."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice in an event of a stream."""

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A choice in a whole answer."""


class TextCompletionFormat:
    """The format of one body's text completions; counts where in the text each token begins."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokens: TokenTable | None, end_ids: Set[int] = frozenset()) -> None:
        self._tokens = tokens
        self._end_ids = end_ids
        self._offsets: dict[int, int] = {}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice in an event, in the same format as in a whole answer."""
        return self.whole(piece)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A choice in a whole answer."""
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [token_text(self._tokens, id_) for id_ in piece.ids]
        offsets, offset = [], self._offsets.get(piece.index, 0)
        for id_, text in zip(piece.ids, texts, strict=True):
            offsets.append(offset)
            if text_bytes(self._tokens, id_, self._end_ids):  # else only a name, and no text
                offset += len(text)
        self._offsets[piece.index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [
                None if entry is None else self._likeliest(text, entry)
                for text, entry in zip(texts, piece.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _likeliest(self, text: str, entry: common_pb2.TokenLogprob) -> dict[str, float]:
        """Log-probabilities by text, with the generated token's among them.

        Where several tokens have one text, the likeliest token counts.
        """
        found: dict[str, float] = {}
        for id_, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            found.setdefault(token_text(self._tokens, id_), _finite(logprob))
        found.setdefault(text, _finite(entry.logprob))
        return found


class ChatCompletionFormat:
    """The format of chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, tokens: TokenTable | None, end_ids: Set[int] = frozenset(), plan: ChatPlan = _PLAIN
    ) -> None:
        self._tokens = tokens
        self._end_ids = end_ids
        self._plan = plan
        self._messages: dict[int, ChatMessage] = {}
        """The message of each choice that is streamed, by the choice's index."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice in an event of a stream; the choice's first event names the role, too.

        Clients take the first event for the first token: an event with the role alone would come too soon.
        """
        role = {"role": "assistant"} if piece.first else {}
        message = self._messages.setdefault(piece.index, ChatMessage(self._plan))
        delta = message.delta(piece.text, last=piece.finish is not None, parsed=piece.parsed)
        if not delta and (piece.ids or piece.first):
            delta = {"content": ""}
        return {"index": piece.index, "delta": role | delta, **self._ending(piece, message)}

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A choice in a whole answer."""
        message = ChatMessage(self._plan)
        said = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            **message.whole(piece.text, piece.parsed),
        }
        return {"index": piece.index, "message": said, **self._ending(piece, message)}

    def _ending(self, piece: Piece, message: ChatMessage) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs:
            entries = zip(piece.ids, piece.logprobs, strict=True)
            content = [self._logprob(id_, entry) for id_, entry in entries if entry is not None]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": message.finish(piece.finish)}

    def _logprob(self, id_: int, entry: common_pb2.TokenLogprob) -> dict[str, Any]:
        top: Sequence[tuple[int, float]] = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
        return {
            **self._token(id_, entry.logprob),
            "top_logprobs": [self._token(other, logprob) for other, logprob in top],
        }

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        data = text_bytes(self._tokens, id_, self._end_ids)
        text = token_text(self._tokens, id_)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data) if data else None}


def text_bytes(tokens: TokenTable | None, id_: int, end_ids: Set[int]) -> bytes:
    """The bytes that a token adds to the text: none for a special token or one that ends the request."""
    return b"" if tokens is None or id_ in end_ids else tokens.token_bytes(id_)


def token_text(tokens: TokenTable | None, id_: int) -> str:
    """A token as a reader sees it: its text, a special token's name, or its id where it has neither."""
    if tokens is not None:
        data = tokens.token_bytes(id_)
        if data:
            return data.decode("utf-8", "replace")
        if name := tokens.token(id_):
            return name
    return f"token_id:{id_}"


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
