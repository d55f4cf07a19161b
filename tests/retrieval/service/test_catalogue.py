"""Whose memories a session draws on: its own tenant's and everybody's, never another's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.source.events import NotFollowed
from retrieval_service.catalogue import Catalogue, CorpusKey, scope
from retrieval_service.corpus.index import CorpusIndex
from speculative.errors import InvalidRequest

Made = Callable[[str, str | None, list[int]], CorpusIndex]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A corpus of one document."""
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from retrieval_service.corpus.build import build
    from retrieval_service.corpus.encoding import Ids
    from retrieval_service.corpus.plan import CorpusSettings

    class One:
        again = True

        def __init__(self, ids: list[int]) -> None:
            self.name = str(ids)
            self.left_out: Counter[str] = Counter()
            self._ids = ids

        def __iter__(self) -> Iterator[str]:
            yield str(self._ids)

        def encode(self, documents: Sequence[str]) -> list[Ids | None]:
            return [np.array(self._ids, dtype=np.uint32)]

        def raw(self, document: str) -> bytes:
            return document.encode()

    def make(name: str, owner: str | None, ids: list[int]) -> CorpusIndex:
        folder = tmp_path / f"{owner}-{name}"
        build(folder, CorpusSettings("d" * 64, 1000, owner), One(ids))
        return CorpusIndex.open(folder)

    return make


@pytest.fixture
def catalogue(made: Made) -> Catalogue:
    catalogue = Catalogue()
    for name, owner, ids in (
        ("shared", None, [1, 2, 3, 4]),
        ("own", "a", [1, 2, 5, 6]),
        ("own", "b", [1, 2, 7, 8]),
    ):
        catalogue.add(CorpusKey(owner, name), made(name, owner, ids))
    return catalogue


def next_ids(catalogue: Catalogue, tenant: str, *asked: str) -> set[int]:
    trie = catalogue.corpora(tenant, asked).lookup([1, 2], node_limit=9, depth=1)
    return set() if trie is None else set(trie.tokens)


def test_a_session_draws_on_its_own_tenants_corpora_and_everybodys(catalogue: Catalogue) -> None:
    assert next_ids(catalogue, "a") == {3, 5}
    assert next_ids(catalogue, "b") == {3, 7}
    assert next_ids(catalogue, "") == {3}


def test_named_corpora_alone_are_drawn_on(catalogue: Catalogue) -> None:
    assert next_ids(catalogue, "a", "own") == {5}
    assert next_ids(catalogue, "a", "shared") == {3}


def test_another_tenants_corpus_is_refused_like_one_that_is_not_there(
    catalogue: Catalogue, made: Made
) -> None:
    catalogue.add(CorpusKey("b", "secret"), made("secret", "b", [1, 2, 9]))
    said = []
    for name in ("secret", "nowhere"):
        with pytest.raises(NotFollowed) as refused:
            catalogue.corpora("a", (name,))
        said.append(str(refused.value).replace(name, "NAME"))
    assert said[0] == said[1] == "tenant 'a' has no corpus 'NAME' here"


def test_a_corpus_that_goes_is_drawn_on_no_longer(catalogue: Catalogue) -> None:
    drawn = catalogue.corpora("a", ())
    assert catalogue.remove(CorpusKey("a", "own"))
    assert not catalogue.remove(CorpusKey("a", "own"))
    assert next_ids(catalogue, "a") == {3}
    assert set(drawn.lookup([1, 2], node_limit=9, depth=1).tokens) == {3}, "not even by who holds it"  # type: ignore[union-attr]


def test_a_corpus_takes_the_place_of_the_one_of_its_name(catalogue: Catalogue, made: Made) -> None:
    assert next_ids(catalogue, "a") == {3, 5}
    catalogue.add(CorpusKey("a", "own"), made("anew", "a", [1, 2, 9]))
    assert next_ids(catalogue, "a") == {3, 9}


def test_a_corpus_of_somebody_else_is_not_taken_under_anothers_name(catalogue: Catalogue, made: Made) -> None:
    with pytest.raises(InvalidRequest, match="belong to b"):
        catalogue.add(CorpusKey(None, "leak"), made("leak", "b", [1, 2, 9]))


def test_the_tenant_without_a_name_is_a_tenant_too() -> None:
    assert len({scope(""), scope("a"), scope("tenant "), ""}) == 4
