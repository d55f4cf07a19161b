"""Pieces of answers as the two kinds of completion tell them. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

from orchestrator.front.http.accumulator import Piece
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2

LEAST = -9999.0
"""Stands for a probability of 0, which JSON has no logarithm of."""


class Shape(Protocol):
    """How one kind is told."""

    whole_object: str
    """What `object` says of a whole answer."""
    chunk_object: str
    """What it says of an event."""
    id_prefix: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice before there is anything of it, where that is told."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice in an event."""

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A choice in a whole answer."""


class TextShape:
    """Completions. It is of one request: it counts where in the text an id stands."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, tokens: TokenTable | None) -> None:
        self._tokens = tokens
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A text begins with its first piece."""
        return None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The same as a whole one."""
        return self.whole(piece)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """One of `choices`."""
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [token_text(self._tokens, id_) for id_ in piece.ids]
        offsets, offset = [], self._offsets.get(piece.index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[piece.index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [_finite(told.logprob) for told in piece.logprobs],
            "top_logprobs": [
                self._likeliest(text, told) for text, told in zip(texts, piece.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _likeliest(self, text: str, told: common_pb2.TokenLogprob) -> dict[str, float]:
        """By text, so that of several ids with one text the likeliest is told; the generated one is among
        them."""
        found: dict[str, float] = {}
        for id_, logprob in zip(told.top_ids, told.top_logprobs, strict=True):
            found.setdefault(token_text(self._tokens, id_), _finite(logprob))
        found.setdefault(text, _finite(told.logprob))
        return found


class ChatShape:
    """Chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, tokens: TokenTable | None) -> None:
        self._tokens = tokens

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role comes first."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One of an event's `choices`."""
        delta = {"content": piece.text} if piece.text or piece.ids else {}
        return {"index": piece.index, "delta": delta, **self._ending(piece)}

    def whole(self, piece: Piece) -> dict[str, Any]:
        """One of `choices`."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._ending(piece)}

    def _ending(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs:
            content = [self._told(id_, each) for id_, each in zip(piece.ids, piece.logprobs, strict=True)]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _told(self, id_: int, told: common_pb2.TokenLogprob) -> dict[str, Any]:
        top: Sequence[tuple[int, float]] = list(zip(told.top_ids, told.top_logprobs, strict=True))
        return {
            **self._token(id_, told.logprob),
            "top_logprobs": [self._token(other, logprob) for other, logprob in top],
        }

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        data = b"" if self._tokens is None else self._tokens.token_bytes(id_)
        text = token_text(self._tokens, id_)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data) if data else None}


def token_text(tokens: TokenTable | None, id_: int) -> str:
    """An id as a reader sees it: its text, the name of a special one, or its number where it has neither."""
    if tokens is not None:
        data = tokens.token_bytes(id_)
        if data:
            return data.decode("utf-8", "replace")
        if name := tokens.token(id_):
            return name
    return f"token_id:{id_}"


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
