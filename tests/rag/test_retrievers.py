"""Retrievers find the same passages alone, in a batch and from the scores that guesses come from."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.rag.dense import DenseRetriever, hashed_words
from outrider.rag.passages import RagPassage, Retriever
from outrider.rag.sparse import SparseRetriever
from speculative.errors import InvalidRequest

ROOT = Path(__file__).parents[2]
TEXTS = {
    "queue": "class Queue: put get items size",
    "path": "from pathlib import Path read_text write_text",
    "sort": "def sort(items): return sorted(items)",
    "stack": "class Stack: push pop items",
    "twin": "class Stack: push pop items",
}
PASSAGES = [RagPassage(name, text) for name, text in TEXTS.items()]
QUERIES = ["stack push", "read the path", "items of a queue", "sort items sorted", "class"]


def dense(passages: list[RagPassage]) -> Retriever:
    pytest.importorskip("faiss")
    return DenseRetriever(passages, hashed_words(64))


Made = Callable[[list[RagPassage]], Retriever]
RETRIEVERS = pytest.mark.parametrize("made", [SparseRetriever, dense])


@RETRIEVERS
def test_a_passage_about_the_query_is_found_first(made: Made) -> None:
    found = made(PASSAGES).search(QUERIES[:4], 2)
    assert [passages[0].name for passages in found] == ["stack", "path", "queue", "sort"]
    assert all(len(passages) <= 2 for passages in found)


@RETRIEVERS
def test_a_batch_finds_what_single_searches_find(made: Made) -> None:
    retriever = made(PASSAGES)
    alone = [retriever.search([query], 3)[0] for query in QUERIES]
    assert retriever.search(QUERIES, 3) == alone
    assert [passages[:1] for passages in alone] == retriever.search(QUERIES, 1)


@RETRIEVERS
def test_scores_rank_as_searches_do(made: Made) -> None:
    retriever = made(PASSAGES)
    for query in QUERIES:
        scores = dict(zip(TEXTS, retriever.scores(query, PASSAGES), strict=True))
        (found,) = retriever.search([query], len(PASSAGES))
        assert scores[found[0].name] == max(scores.values())
        assert [scores[passage.name] for passage in found] == sorted(
            (scores[passage.name] for passage in found), reverse=True
        )


@RETRIEVERS
def test_of_equal_passages_the_first_is_found(made: Made) -> None:
    assert made(PASSAGES).search(["stack push"], 1)[0][0].name == "stack"
    assert made(PASSAGES[::-1]).search(["stack push"], 1)[0][0].name == "twin"


def test_words_that_no_passage_has_find_nothing() -> None:
    assert SparseRetriever(PASSAGES).search(["zebra", ""], 3) == [[], []]


def test_near_ties_among_many_vectors_fall_as_exact_products_say() -> None:
    """More equal vectors than FAISS lists, and a batch large enough that FAISS sums it by another product."""
    pytest.importorskip("faiss")
    vectors = np.tile(np.random.default_rng(0).normal(size=24), (200, 1))
    vectors[120] *= 1 + 1e-9  # invisible in float32, so that the first of all is right
    passages = [RagPassage(str(row), str(row)) for row in range(200)]
    retriever = DenseRetriever(passages, lambda texts: np.stack([vectors[int(text)] for text in texts]))

    found = retriever.search([str(row) for row in range(64)], 1)

    assert {passages[0].name for passages in found} == {"0"}


@pytest.mark.parametrize("made", [SparseRetriever, lambda passages: DenseRetriever(passages, hashed_words())])
def test_no_passages_and_doubled_names_are_refused(made: Made) -> None:
    pytest.importorskip("faiss")
    with pytest.raises(InvalidRequest, match="no passages"):
        made([])
    with pytest.raises(InvalidRequest, match="2 passages have the name 'queue'"):
        made([*PASSAGES, PASSAGES[0]])


def test_vectors_of_a_wrong_shape_are_refused() -> None:
    pytest.importorskip("faiss")
    with pytest.raises(InvalidRequest, match=r"shape \(1, 3\) for 5 texts"):
        DenseRetriever(PASSAGES, lambda texts: np.zeros((1, 3)))


def test_the_package_loads_neither_faiss_nor_torch() -> None:
    code = "import sys, outrider.rag; print({'faiss', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "set()", done.stderr
