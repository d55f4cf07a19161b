"""Errors of corpora on disk. `code` is the name of the gRPC status that fits best."""

from typing import ClassVar

from speculative.errors import OutriderError


class CorpusError(OutriderError):
    """Base of the errors of corpora on disk; `str()` names the path and what to do."""

    code: ClassVar[str] = "FAILED_PRECONDITION"


class NoCorpus(CorpusError):
    """A path has no complete corpus: nothing, an unfinished build, or other files."""

    code = "NOT_FOUND"


class WrongTokenizer(CorpusError):
    """A corpus was built with another tokenizer."""


class Damaged(CorpusError):
    """A corpus' file is missing, cut short, or differs from what was written."""

    code = "DATA_LOSS"


class WouldReplace(CorpusError):
    """A corpus of other documents is where this one should be built, and nobody said to replace it."""

    code = "ALREADY_EXISTS"


class Held(CorpusError):
    """Another process holds the lock of this corpus."""

    code = "ABORTED"


class OutOfSpace(CorpusError):
    """The disk has no room for a corpus."""

    code = "RESOURCE_EXHAUSTED"


class BadSource(CorpusError):
    """Documents that a corpus is to be built from cannot be used."""

    code = "INVALID_ARGUMENT"
