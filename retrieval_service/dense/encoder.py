"""An encoder in a process of its own: `python -m retrieval_service.dense.encoder --model NAME`.

Texts in, vectors out, over stdin and stdout (framing.py). This process alone imports torch, through
sentence-transformers (the extra `embed`); the service never does.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Protocol

import numpy as np

from retrieval_service.dense.embeddings import Vectors
from retrieval_service.dense.framing import (
    ERROR,
    HELLO,
    TEXTS,
    VECTORS,
    EncoderHello,
    frame,
    pack_vectors,
    read_frame,
)


class Encoder(Protocol):
    """What the encoder process needs of a model that embeds texts."""

    hello: EncoderHello

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts: float32 [len(texts), dimensions], of any length."""
        ...


class SentenceTransformers:
    """A model of the sentence-transformers library. Raises ImportError without the library."""

    def __init__(self, model: str, threads: int) -> None:
        # Read when torch, which it brings, is imported.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from sentence_transformers import SentenceTransformer

        self._model: Any = SentenceTransformer(model, device="cpu")
        width = self._model.encode([""], show_progress_bar=False).shape[1]
        digest = hashlib.sha256()
        for name, values in sorted(self._model.state_dict().items()):
            digest.update(name.encode() + values.float().numpy().tobytes())
        self.hello = EncoderHello(model, digest.hexdigest(), int(width))

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts: float32 [len(texts), dimensions]."""
        return np.asarray(self._model.encode(list(texts), show_progress_bar=False), dtype=np.float32)


def serve(encoder: Encoder, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until the input ends; a failure of the model is answered with ERROR."""
    sink.write(frame(HELLO, json.dumps(asdict(encoder.hello)).encode()))
    sink.flush()
    while (message := read_frame(source.read)) is not None:
        kind, payload = message
        try:
            if kind != TEXTS:
                raise ValueError(f"expected texts, got a message of kind {kind!r}")
            answer = frame(VECTORS, pack_vectors(encoder.encode(json.loads(payload))))
        except Exception as error:  # an error of the model is reported, not fatal
            answer = frame(ERROR, f"{type(error).__name__}: {error}".encode())
        sink.write(answer)
        sink.flush()


def own_stdout() -> BinaryIO:
    """Stdout for messages alone: from now on, prints of libraries go to stderr."""
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sink


def main() -> None:
    """Read the flags, load the model, serve."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_service.dense.encoder")
    parser.add_argument("--model", required=True, help="a sentence-transformers model, name or folder")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    settings = parser.parse_args()
    sink = own_stdout()
    try:
        encoder = SentenceTransformers(settings.model, settings.threads)
    except ImportError as error:
        why = f"{error}; install the extra `embed`: pip install -e .[embed]"
        sink.write(frame(ERROR, why.encode()))
        sink.flush()
        sys.exit(1)
    serve(encoder, sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
