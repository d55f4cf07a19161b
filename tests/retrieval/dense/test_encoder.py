"""An encoder in a process of its own, over its real protocol; the model in it is made up."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.tokens import TokenTable
from retrieval_service.dense.errors import EncoderFailed
from retrieval_service.dense.framing import (
    ERROR,
    TEXTS,
    VECTORS,
    frame,
    pack_vectors,
    read_frame,
    unpack_vectors,
)
from retrieval_service.dense.remote import EncoderProcess

ROOT = Path(__file__).parents[3]
FAKE = """
import os, sys, time
import numpy as np
from retrieval_service.dense.encoder import own_stdout, serve
from retrieval_service.dense.framing import EncoderHello
from pathlib import Path

class Fake:
    changed = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else ""
    hello = EncoderHello("fake", sys.argv[1] + changed, 4)
    def encode(self, texts):
        print("a library that prints")
        if "die" in texts: os._exit(3)
        if "hang" in texts: time.sleep(60)
        if "raise" in texts: raise RuntimeError("cannot say that")
        if "narrow" in texts: return np.ones((len(texts), 3), dtype=np.float32)
        if "garble" in texts: sink.write(b"garbage"); sink.flush()
        return np.array([[len(t), t.count("a"), t.count("b"), 1] for t in texts], dtype=np.float32)

sink = own_stdout()
serve(Fake(), sys.stdin.buffer, sink)
"""
WORDS = ["a", "b", "die", "hang", "raise", "narrow", "garble"]


@pytest.fixture
def tokens() -> TokenTable:
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return TokenTable(tokenizer)


@pytest.fixture
def encoder(tokens: TokenTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[EncoderProcess]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    encoder = EncoderProcess([sys.executable, "-c", FAKE, "digest"], tokens)
    yield encoder
    encoder.close()


def test_an_encoder_says_who_it_is(encoder: EncoderProcess) -> None:
    assert (encoder.name, encoder.digest, encoder.dimensions) == ("fake", "digest", 4)


def test_windows_become_texts_and_unit_vectors(encoder: EncoderProcess) -> None:
    vectors = encoder.embed([[0], [0, 1, 0]])
    expected = np.array([[1, 1, 0, 1], [3, 2, 1, 1]]) / np.sqrt([[3], [15]])
    assert np.allclose(vectors, expected)
    assert vectors.dtype == np.float32
    assert encoder.embed([]).shape == (0, 4)


def test_many_windows_at_once_pass(encoder: EncoderProcess) -> None:
    assert encoder.embed([[0, 1] * 500] * 3000).shape == (3000, 4)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("die", "ended; its stderr says why"),
        ("hang", "timed out|took too long"),
        ("raise", "RuntimeError: cannot say that"),
        ("narrow", "answered nonsense"),
        ("garble", "no message begins with"),
    ],
)
def test_a_failure_is_told_and_the_next_question_is_answered(
    encoder: EncoderProcess, monkeypatch: pytest.MonkeyPatch, word: str, why: str
) -> None:
    with monkeypatch.context() as patch:
        if word == "hang":
            patch.setattr(encoder, "_answer_s", 0.5)
        with pytest.raises(EncoderFailed, match=why):
            encoder.embed([[WORDS.index(word)]])
    assert encoder.embed([[0]]).shape == (1, 4)


def test_another_encoder_after_a_restart_is_refused(
    tokens: TokenTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    version = tmp_path / "version"
    version.write_text("1")
    encoder = EncoderProcess([sys.executable, "-c", FAKE, "digest", str(version)], tokens)
    try:
        version.write_text("2")
        with pytest.raises(EncoderFailed, match="ended"):
            encoder.embed([[WORDS.index("die")]])
        with pytest.raises(EncoderFailed, match=r"came back as fake \(digest2\), it was fake \(digest1\)"):
            encoder.embed([[0]])
    finally:
        encoder.close()


@pytest.mark.parametrize("command", [["/nonexistent"], [sys.executable, "-c", "pass"]])
def test_an_encoder_that_does_not_start_is_reported(tokens: TokenTable, command: list[str]) -> None:
    with pytest.raises(EncoderFailed):
        EncoderProcess(command, tokens)


def test_without_the_library_the_extra_is_named(tokens: TokenTable, tmp_path: Path) -> None:
    """Whether it is installed here or not: a folder in front of it stands for one where it is not."""
    (tmp_path / "sentence_transformers.py").write_text("raise ImportError('no such library')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "retrieval_service.dense.encoder", "--model", "any"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60
    )
    kind, payload = read_frame(io.BytesIO(ended.stdout).read) or (b"", b"")
    assert kind == ERROR
    assert b"no such library; install the extra `embed`" in payload


def test_messages_survive_the_way() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    stream = io.BytesIO(frame(VECTORS, pack_vectors(vectors)) + frame(TEXTS, b"[]"))
    kind, payload = read_frame(stream.read) or (b"", b"")
    assert kind == VECTORS
    assert np.array_equal(unpack_vectors(payload), vectors)
    assert read_frame(stream.read) == (TEXTS, b"[]")
    assert read_frame(stream.read) is None


@pytest.mark.parametrize("size", range(1, 5 + 8 + 24))
def test_a_message_cut_short_is_no_message(size: int) -> None:
    whole = frame(VECTORS, pack_vectors(np.ones((2, 3), dtype=np.float32)))
    with pytest.raises(ValueError, match="ends within"):
        read_frame(io.BytesIO(whole[:size]).read)


@pytest.mark.parametrize("payload", [b"", b"\0" * 7, b"\1\0\0\0\1\0\0\0", b"\0" * 9])
def test_vectors_that_are_not_as_many_as_they_say_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="vectors"):
        unpack_vectors(payload)
