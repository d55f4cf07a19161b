"""Documents: found by what they are about, by those who may see them, and by nobody once deleted."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.index import Kind, Sizes, VectorIndex
from retrieval_service.dense.library import PUBLIC, Chunking, DocumentLibrary
from speculative.errors import InvalidRequest

CHUNKING = Chunking(window=8, stride=4)


def topic(number: int, length: int = 60) -> list[int]:
    """Ids of one topic: one of 20 sets of ten ids."""
    drawn = np.random.default_rng(number)
    return (drawn.integers(0, 10, length) + 10 * (number % 20)).tolist()


@pytest.fixture
def library(embedder: TableEmbedder) -> DocumentLibrary:
    return DocumentLibrary(embedder, "digest", chunking=CHUNKING)


def names(library: DocumentLibrary, tenant: str, ids: list[int], count: int = 50) -> list[str]:
    vector = library.embedder.embed([ids[-8:]])[0]
    return [found.document.name for found in library.search(tenant, vector, count)]


def test_the_document_that_says_the_same_is_nearest(library: DocumentLibrary) -> None:
    documents = {f"{number}": topic(number) for number in range(20)}
    assert library.add(PUBLIC, documents.items()) == 20
    for name, ids in documents.items():
        assert names(library, "anybody", ids[20:28], 1) == [name]


def test_a_search_gives_the_nearest_chunk_of_a_document(library: DocumentLibrary) -> None:
    library.add("a", [("long", [*topic(1), *topic(2), *topic(3)])])
    vector = library.embedder.embed([topic(2)[20:28]])[0]
    found = library.search("a", vector, 1)[0]
    assert found.start == 80
    assert found.score == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(flat=2, hnsw=10**6), Sizes(flat=2, hnsw=16)])
def test_a_tenant_never_gets_anothers_documents(embedder: TableEmbedder, sizes: Sizes) -> None:
    library = DocumentLibrary(embedder, "digest", chunking=CHUNKING, sizes=sizes)
    for tenant in ("a", "b", PUBLIC):
        library.add(tenant, [(f"{tenant}:{number}", topic(number)) for number in range(20)])
    for number in range(20):
        seen = names(library, "a", topic(number), 100)
        assert {name.partition(":")[0] for name in seen} == {"a", ""}
        assert {name.partition(":")[0] for name in names(library, "c", topic(number), 100)} == {""}
    document = library.documents("b")[0]
    assert library.holds("b", document)
    assert not library.holds("a", document)


def test_a_deleted_document_is_found_by_nobody(library: DocumentLibrary) -> None:
    library.add("a", [(f"{number}", topic(number)) for number in range(10)])
    assert library.remove("a", "3")
    assert not library.remove("a", "3")
    assert not library.remove("b", "4")
    assert "3" not in names(library, "a", topic(3))
    assert len(names(library, "a", topic(3))) == 9


def test_forgetting_a_tenant_leaves_the_others(library: DocumentLibrary) -> None:
    library.add("a", [("one", topic(1)), ("two", topic(2))])
    library.add("b", [("three", topic(3))])
    held = library.documents("a")[0]
    assert library.forget("a") == 2
    assert library.forget("a") == 0
    assert names(library, "a", topic(1)) == []
    assert not library.holds("a", held)
    assert names(library, "b", topic(3)) == ["three"]


def test_removing_builds_an_index_once_and_forgetting_builds_none(
    library: DocumentLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.add("a", [(f"{number}", topic(number)) for number in range(20)])
    built: list[int] = []
    build = VectorIndex.build

    def counted(vectors: NDArray[np.floating[Any]], kind: Kind) -> VectorIndex:
        built.append(len(vectors))
        return build(vectors, kind)

    monkeypatch.setattr(VectorIndex, "build", counted)
    assert library.remove("a", *[f"{number}" for number in range(15)], "none") == 15
    assert built == [5 * 14], "the windows of what is left"
    assert library.forget("a") == 5
    assert len(built) == 1


def test_a_known_name_is_replaced(library: DocumentLibrary) -> None:
    library.add("a", [("it", topic(1))])
    before = library.documents("a")[0]
    library.add("a", [("it", topic(2))])
    assert [document.ids.tolist() for document in library.documents("a")] == [topic(2)]
    assert not library.holds("a", before)


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(flat=5, hnsw=40), Sizes(flat=2, hnsw=16)])
def test_any_history_ends_in_what_it_left(embedder: TableEmbedder, sizes: Sizes) -> None:
    """Adding, replacing and removing, while the index changes its kind and is built anew."""
    library = DocumentLibrary(embedder, "digest", chunking=CHUNKING, sizes=sizes)
    drawn = np.random.default_rng(7)
    expected: dict[str, list[int]] = {}
    for step in range(120):
        name = f"{drawn.integers(0, 20)}"
        if drawn.random() < 0.4:
            assert library.remove("a", name) == (expected.pop(name, None) is not None)
        else:
            expected[name] = topic(int(drawn.integers(0, 20)), int(drawn.integers(1, 60)))
            library.add("a", [(name, expected[name])])
        if step % 10 == 0:
            assert set(names(library, "a", topic(step))) <= set(expected)
    assert {document.name: document.ids.tolist() for document in library.documents("a")} == expected
    assert len(expected) > 5
    for ids in expected.values():
        near = library.search("a", embedder.embed([ids[:8]])[0], 50)
        assert {found.document.name for found in near} <= set(expected)
        assert near[0].score > 0.99


@pytest.mark.parametrize("ids", [[1], [5] * 10_000, list(range(200)) * 3])
def test_documents_of_any_size_are_taken(library: DocumentLibrary, ids: list[int]) -> None:
    library.add("a", [("it", ids)])
    assert names(library, "a", ids) == ["it"]


def test_an_empty_document_is_left_out(library: DocumentLibrary) -> None:
    assert library.add("a", [("empty", []), ("full", [1])]) == 1
    assert [document.name for document in library.documents("a")] == ["full"]


def test_a_negative_id_is_refused_by_name(library: DocumentLibrary) -> None:
    with pytest.raises(InvalidRequest, match="'bad' holds the id -5"):
        library.add("a", [("bad", [1, -5])])


def test_searching_beside_adding_and_removing_sees_whole_documents(embedder: TableEmbedder) -> None:
    sizes = Sizes(flat=40, hnsw=10**6)
    library = DocumentLibrary(embedder, "digest", chunking=CHUNKING, sizes=sizes)
    library.add("a", [("kept", topic(0))])
    library.add("b", [("secret", topic(0))])
    wrong: list[object] = []
    over = threading.Event()

    def search() -> None:
        vector = embedder.embed([topic(0)[8:16]])[0]
        while not over.is_set():
            found = library.search("a", vector, 3)
            if not found or found[0].document.name != "kept":
                wrong.append(found)

    searchers = [threading.Thread(target=search) for _ in range(2)]
    for thread in searchers:
        thread.start()
    for number in range(1, 60):
        library.add("a", [(f"{number}", topic(number % 19 + 1))])
        library.remove("a", f"{number - 3}")
    over.set()
    for thread in searchers:
        thread.join(60)
    assert wrong == []
