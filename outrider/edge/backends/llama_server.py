"""A running llama-server of llama.cpp: ids go over its /completion, the likeliest ids come back.

One token a call, as the noise of sampling changes with the position. The server keeps what it has read in one
slot (`cache_prompt`), so that a call computes only the ids that are new to the slot.
"""

import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from outrider.edge.backends import LISTED
from outrider.edge.backends.gguf_vocabulary import read_vocabulary, vocabulary_digest
from outrider.edge.top_k import DraftModelFailed, TopK
from outrider.wire.incoming.http_url import http_url
from speculative.errors import InvalidRequest

TIMEOUT_S = 10.0
"""Timeout of a call in seconds; a prompt that takes longer to read gets no drafts."""
MOST_BYTES = 1 << 20
"""Most bytes that are read of an answer."""


class LlamaServerModel:
    """The model of a llama-server; see `DraftModel`.

    Args:
        url: http://HOST:PORT of the server.
        vocabulary: the GGUF file that the server runs; None: the path that the server reports.
        slot: number of the server's slot to use.
    """

    def __init__(self, url: str, vocabulary: Path | None = None, slot: int = 0) -> None:
        split = http_url(url)
        if split is None or split.hostname is None:
            raise InvalidRequest(f"{url!r} is not the URL of a llama-server, such as http://127.0.0.1:8080")
        self.name = url
        self.max_length = 1 << 20
        self._secure = split.scheme == "https"
        self._host, self._port, self._path = split.hostname, split.port, split.path.rstrip("/")
        self._vocabulary = vocabulary
        self._slot = slot
        self._ids: list[int] = []
        self._connection: http.client.HTTPConnection | None = None
        self._known: tuple[object, str] | None = None  # what the server runs, and its digest
        self._bytes: dict[int, bytes] = {}  # by id, of the latest answer
        self.vocabulary_size = 0

    @classmethod
    def load(cls, place: str, vocabulary: Path | None = None) -> Self:
        """The model of the llama-server at a URL. Raises DraftModelFailed if no server answers."""
        model = cls(place, vocabulary)
        try:
            model.digest()
        except DraftModelFailed:
            model.close()
            raise
        return model

    def forward(self, ids: Sequence[int]) -> TopK:
        """Sends the whole sequence; returns the likeliest ids after the last id."""
        if self._connection is None:
            self._check_same_vocabulary()
        self._ids.extend(ids)
        answer = self._call(
            "/completion",
            {
                "prompt": self._ids,
                "n_predict": 1,
                "n_probs": LISTED,
                "post_sampling_probs": False,
                "temperature": 0,
                "cache_prompt": True,
                "id_slot": self._slot,
                "ignore_eos": False,
            },
        )
        top = TopK.of(_likeliest(answer))
        self._bytes = _bytes_of(answer)
        return top

    def rewind(self, to: int) -> None:
        """Forgets all ids but the first `to`; the server's slot follows with the next call."""
        del self._ids[to:]

    def digest(self) -> str:
        """Digest of the vocabulary of the model that the server runs now.

        Raises:
            DraftModelFailed: the server does not answer, or its GGUF file cannot be read here.
        """
        props = self._call("/props", None)
        settings = props.get("default_generation_settings")
        length = settings.get("n_ctx") if isinstance(settings, Mapping) else None
        if isinstance(length, int) and length > 0:
            self.max_length = length
        path = props.get("model_path")
        if not isinstance(path, str):
            raise DraftModelFailed(f"{self.name}/props names no model_path; is it a llama-server?")
        file = self._vocabulary or Path(path)
        try:
            stamp = file.stat().st_mtime_ns
        except OSError as error:
            if self._vocabulary is not None:
                raise DraftModelFailed(
                    f"--draft-vocabulary names {file}, which cannot be read ({error.strerror}); name a copy "
                    f"of {path}, which {self.name} runs"
                ) from error
            raise DraftModelFailed(
                f"{self.name} runs {path}, which cannot be read on this machine ({error.strerror}); name a "
                f"copy of the file with --draft-vocabulary"
            ) from error
        runs = (path, str(file), stamp)
        if self._known is None or self._known[0] != runs:
            tokens, types = read_vocabulary(file)
            self._known, self.vocabulary_size = (runs, vocabulary_digest(tokens, types)), len(tokens)
        return self._known[1]

    @property
    def end_ids(self) -> frozenset[int]:
        """The server's end-of-sequence id; see `TextModel`."""
        text = self._call("/props", None).get("eos_token")
        return (
            frozenset(self._tokenize(text, special=True)) if isinstance(text, str) and text else frozenset()
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; see `TextModel`."""
        return self._tokenize(text, special=False)

    def token_bytes(self, id_: int) -> bytes:
        """Bytes that an id of the latest answer stands for."""
        return self._bytes.get(id_, b"")

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text: of a prompt, or of a text that names a special token."""
        answer = self._call(
            "/tokenize", {"content": text, "add_special": not special, "parse_special": special}
        )
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
            raise DraftModelFailed(f"{self.name}/tokenize gave no list of ids")
        return ids

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check_same_vocabulary(self) -> None:
        """Raises DraftModelFailed if the server was restarted with a model of another vocabulary."""
        before = self._known
        if before is not None and self.digest() != before[1]:
            self._known = before  # so that the next call is refused, too
            self.close()
            raise DraftModelFailed(f"{self.name} was restarted with a model of another vocabulary")

    def _call(self, path: str, body: dict[str, Any] | None) -> Mapping[str, Any]:
        """The JSON object of the answer. Closes the connection and raises DraftModelFailed on a fault."""
        try:
            status, text = self._ask_once_more(path, body)
            answer = json.loads(text) if status == 200 and len(text) <= MOST_BYTES else None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise DraftModelFailed(f"{self.name} does not answer: {error or type(error).__name__}") from error
        except ValueError as error:
            self.close()
            raise DraftModelFailed(f"{self.name}{path} answered {text[:80]!r}, which is not JSON") from error
        if not isinstance(answer, dict):
            self.close()
            raise DraftModelFailed(f"{self.name}{path} answered {status}: {text[:200]!r}")
        return answer

    def _ask_once_more(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Like `_ask`, but repeats the call over a new connection if the server has closed the open one.

        A llama-server closes a connection that was idle for five seconds. The server may also have
        restarted, so a new connection begins with the vocabulary.
        """
        is_new = self._connection is None
        try:
            return self._ask(path, body)
        except ConnectionError:
            if is_new:
                raise
        self.close()
        if body is not None:
            self._check_same_vocabulary()
            self.close()  # a connection that has not been idle
        return self._ask(path, body)

    def _ask(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Status and body of an answer, of which no more than MOST_BYTES + 1 are read."""
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body, separators=(",", ":"))
        method = "GET" if body is None else "POST"
        self._connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read(MOST_BYTES + 1)


def _likeliest(answer: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Likeliest ids with log-probabilities at the generated position. Raises DraftModelFailed without
    them."""
    try:
        (place,) = answer["completion_probabilities"]
        pairs = [(entry["id"], float(entry["logprob"])) for entry in place["top_logprobs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DraftModelFailed(
            f"an answer of /completion has no list of likeliest tokens: {error!r}"
        ) from error
    if not all(type(id_) is int for id_, _ in pairs):
        raise DraftModelFailed("an answer of /completion has an id that is not a whole number")
    return pairs


def _bytes_of(answer: Mapping[str, Any]) -> dict[int, bytes]:
    """Bytes of the likeliest ids, for those whose bytes the server tells."""
    (place,) = answer["completion_probabilities"]
    found = {}
    for entry in place["top_logprobs"]:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found[entry["id"]] = bytes(entry["bytes"])
    return found
