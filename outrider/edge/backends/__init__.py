"""Models that a device can draft with; each file beside this one is one way to run a model.

A new way is one file here and one line in `MODELS`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from outrider.edge.top_k import TopK
from speculative import implementations
from speculative.errors import InvalidRequest

LISTED = 64
"""Number of likeliest ids that a model gives at a position."""
MODELS = {
    "llama.cpp": "outrider.edge.backends.llama_cpp:LlamaCppModel",
    "llama-server": "outrider.edge.backends.llama_server:LlamaServerModel",
    "torch": "outrider.edge.backends.torch_model:TorchModel",
}
"""Classes of models by kind; each class has a classmethod `load(place, vocabulary)`."""


class DraftModel(Protocol):
    """A model that reads one sequence of ids and tells what it finds likeliest next. Used by one thread.

    Attributes:
        name: the model, for people.
        max_length: the most ids that the model can read.
    """

    name: str
    max_length: int

    def forward(self, ids: Sequence[int]) -> TopK:
        """Reads further ids, at least one; the likeliest ids behind the last of them.

        Raises DraftModelFailed if the model cannot be called or gives an invalid answer; what has been read
        is then not known, and `rewind(0)` begins anew.
        """

    def rewind(self, to: int) -> None:
        """Forgets all ids but the first `to`."""

    def digest(self) -> str:
        """Digest of the model's vocabulary, hexadecimal; see docs/edge.md.

        Read when a request begins: a server may have changed its model. Raises DraftModelFailed.
        """

    def close(self) -> None:
        """Frees the model; the last call."""


@runtime_checkable
class TextModel(DraftModel, Protocol):
    """A model that also knows what text its ids stand for, so that it can answer alone."""

    @property
    def vocabulary_size(self) -> int:
        """Number of the model's ids."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. Raises InvalidRequest without a tokenizer, DraftModelFailed as `forward` does."""

    def token_bytes(self, id_: int) -> bytes:
        """Bytes that an id of the latest answer of `forward` stands for."""


def open_model(place: str, vocabulary: Path | None = None) -> DraftModel:
    """Opens the model at `place`.

    Args:
        place: http://HOST:PORT of a llama-server, a GGUF file, or a folder with a Hugging Face model.
        vocabulary: copy of the llama-server's GGUF file, if the server's path is on another machine.

    Raises:
        InvalidRequest: `place` is none of the three.
        OutriderError: the model cannot be opened; the message gives the reason.
    """
    if place.startswith(("http://", "https://")):
        kind = "llama-server"
    elif Path(place).is_dir():
        kind = "torch"
    elif place.endswith(".gguf") and Path(place).is_file():
        kind = "llama.cpp"
    else:
        raise InvalidRequest(
            f"{place!r} is neither the URL of a llama-server, nor a GGUF file, nor a folder with a model"
        )
    model: DraftModel = implementations.load_implementation(MODELS, kind).load(place, vocabulary)
    return model
