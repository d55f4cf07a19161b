"""Embeddings from a real HTTP server, which answers well, lies, refuses, stalls or goes away."""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.tokens import TokenTable
from retrieval_service.dense.documents import DocumentLimits, Documents
from retrieval_service.dense.errors import EmbeddingsFailed, EmbeddingsUnfit, LibraryMismatch
from retrieval_service.dense.remote import AT_ONCE, EmbeddingsServer
from retrieval_service.loading import load
from retrieval_service.settings import RetrievalSettings
from speculative.errors import InvalidRequest

WORDS = ["a", "b", "c", " "]
LIMITS = DocumentLimits(100_000, 100_000)
Handler = BaseHTTPRequestHandler
Answer = Callable[[Handler, list[str]], None]


def vector_of(text: str) -> list[float]:
    return [1 + text.count("a"), text.count("b"), text.count("c"), 0.5]


def honest(texts: list[str]) -> dict[str, Any]:
    data = [{"index": at, "embedding": vector_of(text)} for at, text in enumerate(texts)]
    # Any order: `index` tells.
    return {"object": "list", "model": "toy", "data": data[::-1]}


def sends(
    body: bytes, status: int = 200, kind: str = "application/json", length: int | None = None
) -> Answer:
    def answer(handler: Handler, texts: list[str]) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def says(change: Callable[[dict[str, Any]], object]) -> Answer:
    """An honest answer, changed."""

    def answer(handler: Handler, texts: list[str]) -> None:
        whole = honest(texts)
        change(whole)
        sends(json.dumps(whole).encode())(handler, texts)

    return answer


def first_is(value: Any) -> Answer:
    """An honest answer in which the first text's embedding is something else."""
    return says(lambda whole: whole["data"][-1].update(embedding=value))


def drips(handler: Handler, texts: list[str]) -> None:
    """Sends a byte at a time until the client has gone, so that no wait for a byte is ever long."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    gone = threading.Event()
    while not gone.wait(0.02):
        handler.wfile.write(b" ")


def stalls(handler: Handler, texts: list[str]) -> None:
    handler.rfile.read(1)


def hangs_up(handler: Handler, texts: list[str]) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


class LyingServer(ThreadingHTTPServer):
    """Answers as `answer` says; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self._Handler)
        self.answer: Answer = says(lambda whole: None)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    class _Handler(BaseHTTPRequestHandler):
        server: "LyingServer"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, dict(self.headers), asked))
            with contextlib.suppress(OSError):
                self.server.answer(self, asked["input"])

        def log_message(self, *_: object) -> None:
            """Says nothing."""


@pytest.fixture
def server() -> Iterator[LyingServer]:
    server = LyingServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose ids are the letters a, b and c, and a space."""
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokens(tokenizer: Path) -> TokenTable:
    return TokenTable.from_json(tokenizer.read_text())


def test_windows_become_texts_and_unit_vectors(server: LyingServer, tokens: TokenTable) -> None:
    embedder = EmbeddingsServer(server.url, tokens, model="toy", key="secret")
    vectors = embedder.embed([[0], [3], [], [1, 0, 1]])
    expected = np.array([vector_of("a"), vector_of("bab")])
    assert np.allclose(vectors[[0, 3]], expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert not vectors[[1, 2]].any()
    assert (vectors.dtype, embedder.dimensions, embedder.name) == (np.float32, 4, f"toy of {server.url}")
    path, headers, asked = server.asked[-1]
    assert (path, headers["Authorization"]) == ("/v1/embeddings", "Bearer secret")
    assert asked == {"input": ["a", "bab"], "model": "toy", "encoding_format": "float"}


def test_many_windows_are_asked_for_in_batches(server: LyingServer, tokens: TokenTable) -> None:
    embedder = EmbeddingsServer(server.url, tokens)
    assert embedder.embed([[at % 3] for at in range(AT_ONCE + 2)]).shape == (AT_ONCE + 2, 4)
    assert [len(asked["input"]) for _, _, asked in server.asked] == [1, AT_ONCE, 2]
    assert "model" not in server.asked[0][2]


LIES = {
    "HTML": (sends(b"<html>Sign in</html>", kind="text/html"), "it is not JSON"),
    "an object": (sends(b"{}"), "no list `data`"),
    "too few": (says(lambda whole: whole["data"].pop()), "embeddings for"),
    "too many": (says(lambda whole: whole["data"].append({})), "embeddings for"),
    "one twice": (says(lambda whole: whole["data"][0].update(index=7)), "no index of its own"),
    "no object": (says(lambda whole: whole["data"].__setitem__(0, 1)), "no index of its own"),
    "no vector": (first_is(None), "no `embedding`"),
    "base64": (first_is("AACAPwAAgD8="), "no `embedding`"),
    "no numbers": (first_is([]), "no `embedding`"),
    "a word": (first_is([1, "b", 0, 0]), "holds str where"),
    "truth": (first_is([True, 0, 0, 0]), "holds bool where"),
    "NaN": (first_is([float("nan"), 0, 0, 0]), "holds a number beyond"),
    "zeros alone": (first_is([0, 0.0, 0, 0]), "the embedding of item [01] of `data` is all zeros"),
    "infinity": (first_is([1, float("-inf"), 0, 0]), "holds a number beyond"),
    "beyond float32": (first_is([10**400, 0, 0, 0]), "holds a number beyond"),
    "too wide": (first_is([0] * 20_000), "no `embedding` of 1 to 16384 numbers"),
    "endless": (sends(b" " * 2_000_000), "more than .* bytes"),
    "nested": (sends(b"[" * 50_000), "not JSON"),
    "no such path": (sends(b"", 404), "answered 404 .*often ends in /v1"),
    "a wrong key": (sends(b'{"error": "who are you?"}', 401), "answered 401 .*embeddings_key"),
    "elsewhere": (sends(b"", 302), "answered 302"),
}
AWAY = {
    "busy": (sends(b"later", 429), "answered 429"),
    "broken": (sends(b"", 503), "answered 503"),
    "hangs up": (hangs_up, "cannot be asked"),
    "cut short": (sends(b'{"data"', length=100), "cut short"),
}
NEVER: dict[str, Answer] = {"stalls": stalls, "drips": drips}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_the_first_answer_and_in_a_later_one(
    server: LyingServer, tokens: TokenTable, lie: str
) -> None:
    embedder = EmbeddingsServer(server.url, tokens, key="secret")
    server.answer, why = LIES[lie]
    with pytest.raises(EmbeddingsUnfit, match=f"(?s){why}") as refused:
        embedder.embed([[0], [1]])
    assert "secret" not in str(refused.value)
    with pytest.raises(EmbeddingsUnfit):
        EmbeddingsServer(server.url, tokens)
    server.answer = says(lambda whole: None)
    assert embedder.embed([[0]]).any()


@pytest.mark.parametrize("away", AWAY)
def test_a_server_that_cannot_answer_is_asked_again_the_next_time(
    server: LyingServer, tokens: TokenTable, away: str
) -> None:
    embedder = EmbeddingsServer(server.url, tokens)
    server.answer, why = AWAY[away]
    with pytest.raises(EmbeddingsFailed, match=why):
        embedder.embed([[0]])
    server.answer = says(lambda whole: None)
    assert embedder.embed([[0]]).any()


@pytest.mark.parametrize("never", NEVER)
def test_a_request_ends_at_its_deadline_whatever_the_server_does(
    server: LyingServer, tokens: TokenTable, never: str
) -> None:
    server.answer = NEVER[never]
    with pytest.raises(EmbeddingsFailed, match=r"no whole answer within 0\.3 s"):
        EmbeddingsServer(server.url, tokens, deadline_s=0.3)


def test_a_worker_that_closes_waits_for_no_answer(server: LyingServer, tokens: TokenTable) -> None:
    embedder = EmbeddingsServer(server.url, tokens, deadline_s=600)
    asked = threading.Event()

    def stall(handler: Handler, texts: list[str]) -> None:
        asked.set()
        stalls(handler, texts)

    server.answer = stall
    failed: list[BaseException] = []

    def embed() -> None:
        try:
            embedder.embed([[0]])
        except EmbeddingsFailed as error:
            failed.append(error)

    thread = threading.Thread(target=embed)
    thread.start()
    assert asked.wait(60)
    embedder.close()
    thread.join(60)
    assert failed
    with pytest.raises(EmbeddingsFailed, match="closing"):
        embedder.embed([[0]])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda whole: [one["embedding"].append(1.0) for one in whole["data"]],
            "have 5 numbers, the first had 4",
        ),
        (lambda whole: whole.update(model="other"), "of the model 'other', and the first was of 'toy'"),
        (lambda whole: whole["data"][0]["embedding"].pop(), "vectors have 3 and 4 numbers"),
    ],
)
def test_another_model_behind_the_url_is_refused(
    server: LyingServer, tokens: TokenTable, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    embedder = EmbeddingsServer(server.url, tokens)
    server.answer = says(change)
    with pytest.raises(EmbeddingsUnfit, match=why):
        embedder.embed([[0], [1]])


def add_nothing(documents: Documents) -> None:
    """The model is checked with the first of all windows."""


def leave_an_empty_scope(documents: Documents) -> None:
    documents.add("first", [("one", [0])])
    documents.remove("first", ["one"])


def add_one_that_says_nothing(documents: Documents) -> None:
    documents.add("first", [("spaces", [3, 3])])


@pytest.mark.parametrize("begin", [add_nothing, leave_an_empty_scope, add_one_that_says_nothing])
def test_saved_documents_are_refused_by_another_model_of_the_same_name(
    server: LyingServer, tokens: TokenTable, tmp_path: Path, begin: Callable[[Documents], None]
) -> None:
    documents = Documents(EmbeddingsServer(server.url, tokens), "digest", tmp_path, LIMITS)
    begin(documents)
    documents.add("acme", [("one", [0, 1, 2])])
    for tenant in ("first", "acme"):
        documents.save(tenant)
    documents.close()
    Documents(EmbeddingsServer(server.url, tokens), "digest", tmp_path, LIMITS).close()
    server.answer = says(lambda whole: [one["embedding"].reverse() for one in whole["data"]])
    with pytest.raises(LibraryMismatch, match="gives other vectors than those saved"):
        Documents(EmbeddingsServer(server.url, tokens), "digest", tmp_path, LIMITS)


def test_sessions_go_on_while_the_server_is_away_and_find_documents_afterwards(
    server: LyingServer, tokens: TokenTable, caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents(EmbeddingsServer(server.url, tokens), "digest", None, LIMITS)
    near = documents.near
    try:
        documents.add("acme", [("one", [0, 1, 2, 0, 1, 2])])
        server.answer = sends(b"", 503)
        with caplog.at_level(logging.WARNING):
            memories = [near.follow(name, "acme", [0, 1]) for name in ("first", "second")]
            assert near.is_idle(60)
        assert all(memory.lookup([0, 1], node_limit=4, depth=2) is None for memory in memories)
        assert caplog.text.count("searches for documents fail") == 1
        server.answer = says(lambda whole: None)
        near.progress("first", [0, 1] * 64)
        assert near.is_idle(60)
        assert memories[0].documents == ("one",)
        assert (near.counts.done, near.counts.failed) == (1, 2)
    finally:
        near.close()


def test_a_worker_starts_without_documents_while_the_server_is_away(
    server: LyingServer, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RetrievalSettings(
        tokenizer=str(tokenizer), embeddings_url=SecretStr(server.url), embeddings="/nowhere"
    )
    server.answer = sends(b"", 503)
    loaded = load(settings)
    loaded.close()
    assert loaded.documents is None
    assert "answered 503" in loaded.no_documents
    assert "the worker has no documents" in caplog.text
    server.answer = sends(b"<html>", kind="text/html")
    with pytest.raises(EmbeddingsUnfit, match="not JSON"):
        load(settings)
    server.answer = says(lambda whole: None)
    loaded = load(settings)
    loaded.close()
    assert loaded.documents is not None
    with pytest.raises(InvalidRequest, match="give --tokenizer"):
        load(RetrievalSettings(embeddings_url=SecretStr(server.url)))


@pytest.mark.parametrize(
    "url",
    [
        "host:8080/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://host:x/v1",
        "http://host/v1?a=b",
        "http://host/a b",
        "http://host/\u00e9",
        "http://me:pw@host/v1",
        "http://me:pw@host:99999/v1",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(tokens: TokenTable, url: str) -> None:
    with pytest.raises(InvalidRequest, match="embeddings_url") as refused:
        EmbeddingsServer(url, tokens)
    assert "pw" not in str(refused.value)


def test_the_settings_show_no_url(server: LyingServer) -> None:
    settings = RetrievalSettings(embeddings_url=SecretStr("http://me:pw@host/v1"))
    assert "pw" not in f"{settings} {settings.model_dump()}"


def test_only_the_first_answer_is_quoted_for_later_ones_may_repeat_text(
    server: LyingServer, tokens: TokenTable
) -> None:
    embedder = EmbeddingsServer(server.url, tokens)
    for status in (200, 401):
        server.answer = sends(b"<html>abc", status)
        with pytest.raises(EmbeddingsUnfit, match=r"\(it begins '<html>abc'\)"):
            EmbeddingsServer(server.url, tokens)
        with pytest.raises(EmbeddingsUnfit) as later:
            embedder.embed([[0]])
        assert "abc" not in str(later.value)


def test_a_key_that_no_header_may_have_is_refused_unquoted(tokens: TokenTable) -> None:
    with pytest.raises(InvalidRequest, match="embeddings_key is no key") as refused:
        EmbeddingsServer("http://127.0.0.1:1/v1", tokens, key="sec\nret")
    assert "ret" not in str(refused.value)
