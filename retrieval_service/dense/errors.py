"""Errors of a library of documents. `code` is the name of the gRPC status that fits best."""

from typing import ClassVar

from speculative.errors import OutriderError


class DenseError(OutriderError):
    """A library of documents cannot be used; `str()` says why and what to do."""

    code: ClassVar[str] = "FAILED_PRECONDITION"


class NoLibrary(DenseError):
    """A folder has no completely saved library."""

    code = "NOT_FOUND"


class LibraryDamaged(DenseError):
    """A library's file is missing, cut short, or differs from what was written."""

    code = "DATA_LOSS"


class LibraryMismatch(DenseError):
    """A library was made with another embedder or tokenizer."""


class UnfitWeights(DenseError):
    """A model folder from which no table of input embeddings can be read."""

    code = "INVALID_ARGUMENT"


class NoEmbeddingTable(UnfitWeights):
    """A model folder without a table of input embeddings of a known name and dtype."""


class EmbeddingsFailed(DenseError):
    """The embeddings server cannot be reached, is too slow, or cannot answer now."""

    code = "UNAVAILABLE"


class EmbeddingsUnfit(DenseError):
    """The embeddings server refuses, answers with something else, or has changed its model."""
