"""Puts these tests' helpers where they can import them."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retrieval_service.corpus.index import CorpusIndex

sys.path.insert(0, str(Path(__file__).parent / "support"))

Make = Callable[..., CorpusIndex]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A path for a corpus; nothing is there yet."""
    return tmp_path / "corpus"


@pytest.fixture
def make(folder: Path) -> Make:
    """A function that builds a corpus of documents in `folder` and opens it."""
    from corpora import DIGEST, make_corpus

    def make(
        documents: Sequence[Sequence[int]], *, vocabulary: int = 50, shard_tokens: int = 1000
    ) -> CorpusIndex:
        make_corpus(folder, documents, vocabulary=vocabulary, shard_tokens=shard_tokens)
        return CorpusIndex.open(folder, DIGEST)

    return make
