"""llama.cpp in this process, by the package llama-cpp-python: a GGUF file, quantised or not, and no server.

Needs the extra [edge-llama]. Uses the C interface alone: the package's own class copies every row of logits.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from outrider.edge.backends import LISTED
from outrider.edge.backends.gguf_vocabulary import read_vocabulary, vocabulary_digest
from outrider.edge.top_k import DraftModelFailed, TopK
from speculative.errors import InvalidRequest

CHUNK = 256
"""The most ids read in one pass."""
CONTEXT = 8192
"""The most ids that a model reads, however long its own context is: keys and values take memory."""
THREADS = 4
"""The most threads of a pass, unless OMP_NUM_THREADS names a number; a small model gains little from more."""


class LlamaContext(Protocol):
    """One sequence of ids in llama.cpp's memory, and the model's vocabulary.

    Attributes:
        width: number of ids of the vocabulary.
        end_ids: ids that end an answer.
    """

    width: int
    end_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Reads 1 to CHUNK further ids; the logits behind the last of them: float32[V].

        Raises DraftModelFailed.
        """

    def cut(self, to: int) -> bool:
        """Forgets all ids but the first `to`; False if the model's memory cannot be cut there."""

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text in UTF-8, with the special ids that the model puts around texts."""

    def piece(self, id_: int) -> bytes:
        """Bytes that an id stands for; none for special ids."""

    def close(self) -> None:
        """Frees the memory; the last call."""


class LlamaCppModel:
    """A model of llama.cpp that reads one sequence; see `DraftModel`.

    Args:
        context: the sequence.
        name: the model, for people.
        max_length: the most ids that the context holds.
        digest: the vocabulary's digest.
    """

    def __init__(self, context: LlamaContext, name: str, max_length: int, digest: str) -> None:
        self.name = name
        self.max_length = max_length
        self.vocabulary_size = context.width
        self.end_ids = context.end_ids
        self._context = context
        self._digest = digest
        self._ids: list[int] = []
        self._unread = 0  # ids at the end of `_ids` that the context has not read

    @classmethod
    def load(cls, place: str, vocabulary: Path | None = None) -> Self:
        """The model of a GGUF file.

        Raises:
            InvalidRequest: llama-cpp-python is not installed.
            DraftModelFailed: the file cannot be read, or llama.cpp does not know the model.
        """
        digest = vocabulary_digest(*read_vocabulary(Path(place)))
        try:
            context = _BoundContext(place)
        except ImportError as error:
            raise InvalidRequest(
                f"{place} is a GGUF file, and llama-cpp-python, which reads such files, cannot be imported "
                f"({error}): pip install 'outrider[edge-llama]', or start `llama-server --model {place} "
                f"--port 8080` and give http://127.0.0.1:8080"
            ) from error
        return cls(context, place, context.length, digest)

    def forward(self, ids: Sequence[int]) -> TopK:
        """Reads further ids in chunks; returns the likeliest ids after the last id."""
        self._ids.extend(ids)
        self._unread += len(ids)
        row = None
        while self._unread:
            start = len(self._ids) - self._unread
            chunk = self._ids[start : start + CHUNK]
            row = self._context.decode(chunk)
            self._unread -= len(chunk)
        if row is None:
            raise DraftModelFailed(f"{self.name} was asked to read no id")
        return TopK.of_row(row, LISTED)

    def rewind(self, to: int) -> None:
        """Forgets all ids but the first `to`. A memory that cannot be cut is emptied and filled again."""
        read = len(self._ids) - self._unread
        del self._ids[to:]
        if to == 0 or (to < read and not self._context.cut(to)):
            self._context.cut(0)  # also after a pass that failed, when nobody knows what was read
            read = 0
        self._unread = max(0, to - read)

    def digest(self) -> str:
        """Digest of the file's vocabulary."""
        return self._digest

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; see `TextModel`."""
        return self._context.encode(text.encode())

    def token_bytes(self, id_: int) -> bytes:
        """Bytes that an id stands for."""
        return self._context.piece(id_)

    def close(self) -> None:
        """Frees the model."""
        self._context.close()


class _BoundContext:
    """A sequence by llama.cpp's C interface.

    Raises ImportError without llama-cpp-python, DraftModelFailed where llama.cpp refuses the file.
    """

    def __init__(self, place: str) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # else it prints each tensor
        self._lib: Any = llama_cpp
        self._context = self._model = None
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(place), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise DraftModelFailed(f"{place}: llama.cpp cannot load the model; its message is on stderr")
        self.length: int = min(CONTEXT, llama_cpp.llama_model_n_ctx_train(self._model))
        shape = llama_cpp.llama_context_default_params()
        shape.n_ctx, shape.n_batch, shape.n_ubatch = self.length, CHUNK, CHUNK
        shape.n_threads = shape.n_threads_batch = _threads()
        self._context = llama_cpp.llama_init_from_model(self._model, shape)
        if not self._context:
            self.close()
            raise DraftModelFailed(f"{place}: llama.cpp has no memory for {self.length} ids of context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.width: int = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self.end_ids = frozenset(
            id_ for id_ in range(self.width) if llama_cpp.llama_vocab_is_eog(self._vocabulary, id_)
        )

    def decode(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Reads further ids; see LlamaContext."""
        if max(ids) >= self.width:
            raise DraftModelFailed(f"id {max(ids)} is outside the model's vocabulary of {self.width} ids")
        tokens = (self._lib.llama_token * len(ids))(*ids)
        status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids)))
        if status:
            raise DraftModelFailed(f"llama.cpp's pass over {len(ids)} ids ended with status {status}")
        row = self._lib.llama_get_logits_ith(self._context, -1)
        pointer = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
        return np.array(np.ctypeslib.as_array(pointer, (self.width,)), dtype=np.float32)

    def cut(self, to: int) -> bool:
        """Forgets all ids but the first `to`; see LlamaContext."""
        if to == 0:
            self._lib.llama_memory_clear(self._memory, True)
            return True
        return bool(self._lib.llama_memory_seq_rm(self._memory, 0, to, -1))

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text; see LlamaContext."""
        most = len(text) + 8  # no token is shorter than a byte, and special ones are few
        ids = (self._lib.llama_token * most)()
        count = self._lib.llama_tokenize(self._vocabulary, text, len(text), ids, most, True, False)
        if count < 0:
            raise DraftModelFailed(f"llama.cpp cannot turn a text of {len(text)} bytes into ids")
        return list(ids[:count])

    def piece(self, id_: int) -> bytes:
        """Bytes that an id stands for; see LlamaContext."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._lib.llama_token_to_piece(self._vocabulary, id_, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def close(self) -> None:
        """Frees context and model."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None


def _threads() -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else min(THREADS, os.cpu_count() or 1)
