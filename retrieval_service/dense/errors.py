"""What can be wrong with a library of documents. `code` is the name of the gRPC status that says it best."""

from typing import ClassVar

from speculative.errors import OutriderError


class DenseError(OutriderError):
    """Something about a library of documents; `str()` says what and what to do."""

    code: ClassVar[str] = "FAILED_PRECONDITION"


class NoLibrary(DenseError):
    """Nothing there that was saved whole."""

    code = "NOT_FOUND"


class LibraryDamaged(DenseError):
    """A file is missing, cut short, or not what was written."""

    code = "DATA_LOSS"


class LibraryMismatch(DenseError):
    """It was made with another embedder or another tokenizer."""


class UnfitWeights(DenseError):
    """A model folder from which no table of input embeddings can be read."""

    code = "INVALID_ARGUMENT"


class EncoderFailed(DenseError):
    """The encoder's process ended, answered nonsense or took too long."""

    code = "UNAVAILABLE"
