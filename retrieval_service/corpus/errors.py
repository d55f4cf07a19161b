"""Errors of corpora on disk. `code` is the name of the gRPC status that fits best."""

from typing import ClassVar

from speculative.errors import OutriderError


class CorpusError(OutriderError):
    """Something about a corpus on disk; `str()` names the path and what to do."""

    code: ClassVar[str] = "FAILED_PRECONDITION"


class NoCorpus(CorpusError):
    """Nothing there, nothing finished there, or something that is no corpus."""

    code = "NOT_FOUND"


class WrongTokenizer(CorpusError):
    """A corpus was built with another tokenizer."""


class Damaged(CorpusError):
    """A file is missing, cut short, or not what was written."""

    code = "DATA_LOSS"


class Held(CorpusError):
    """Another process is writing to this path."""

    code = "ABORTED"


class OutOfSpace(CorpusError):
    """The disk takes no more."""

    code = "RESOURCE_EXHAUSTED"


class BadSource(CorpusError):
    """Documents that a corpus is to be built from cannot be used."""

    code = "INVALID_ARGUMENT"
