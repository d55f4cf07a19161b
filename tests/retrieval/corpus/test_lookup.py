"""Lookups in corpora give what a search through all their documents gives."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from corpora import DIGEST, make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_service import trie
from retrieval_service.corpus.errors import WrongTokenizer
from retrieval_service.corpus.index import Corpora, CorpusIndex
from retrieval_service.corpus.manage import remove
from retrieval_service.corpus.search import LONGEST_MATCH, MOST_READ
from retrieval_service.trie import CountedTrie

ROOT = Path(__file__).resolve().parents[3]
Make = Callable[..., CorpusIndex]
LARGE = 70_000
FEW = st.integers(0, 3)


def by_reading(
    documents: Sequence[Sequence[int]], ids: Sequence[int], limit: int, depth: int
) -> CountedTrie | None:
    """The longest suffix that stands anywhere with something after it, by looking at every place."""
    for length in range(min(len(ids), LONGEST_MATCH), 0, -1):
        suffix = list(ids[-length:])
        ends = [
            (document, start + length)
            for document in documents
            for start in range(len(document) - length)
            if list(document[start : start + length]) == suffix
        ]
        if ends:
            return trie.counted([document[end : end + depth] for document, end in ends], length, limit)
    return None


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(st.lists(FEW, max_size=12), max_size=5),
    contexts=st.lists(st.lists(FEW, max_size=8), min_size=1, max_size=8),
    shard_tokens=st.sampled_from([14, 25, 1000]),
    limit=st.integers(1, 40),
    depth=st.integers(1, 6),
    offset=st.sampled_from([0, 200, LARGE]),
)
def test_a_lookup_finds_what_reading_every_document_finds(
    documents: list[list[int]],
    contexts: list[list[int]],
    shard_tokens: int,
    limit: int,
    depth: int,
    offset: int,
) -> None:
    documents = [[id_ + offset for id_ in document] for document in documents]
    with TemporaryDirectory() as folder:
        make_corpus(Path(folder), documents, vocabulary=offset + 4, shard_tokens=shard_tokens)
        index = CorpusIndex.open(Path(folder))
        for context in contexts:
            ids = [id_ + offset for id_ in context]
            found = index.lookup(ids, node_limit=limit, depth=depth)
            assert found == by_reading(documents, ids, limit, depth)


@pytest.mark.parametrize("vocabulary", [300, 0xFFFF, 0x10000, 200_000])
def test_lookups_in_long_texts_of_any_vocabulary(vocabulary: int, make: Make) -> None:
    rng = np.random.default_rng(vocabulary)
    pool = np.union1d(rng.choice(vocabulary, 299, replace=False), [vocabulary - 1])
    documents = [rng.choice(pool, 700).tolist() for _ in range(6)]
    index = make(documents, vocabulary=vocabulary, shard_tokens=1500)
    for number in range(60):
        document = documents[number % 6]
        end = int(rng.integers(1, 700))
        ids = [*document[max(0, end - 50) : end], *([int(rng.choice(pool))] if number % 3 == 0 else [])]
        assert index.lookup(ids, node_limit=64, depth=8) == by_reading(documents, ids, 64, 8)


@pytest.mark.parametrize("distinct", [10, 70_000])
def test_ids_beyond_sixteen_bits_are_found_however_many_there_are(distinct: int, make: Make) -> None:
    document = np.random.default_rng(0).permutation(distinct).astype(np.int64) + 100_000
    index = make([document.tolist()], vocabulary=200_000, shard_tokens=1 << 20)
    middle = distinct // 2
    found = index.lookup(document[middle - 3 : middle].tolist(), node_limit=5, depth=3)
    assert found is not None
    assert found.tokens == tuple(document[middle : middle + 3].tolist())
    assert found.match_length == 3


def test_a_draft_ends_with_its_document(make: Make) -> None:
    found = make([[1, 2, 3], [4, 5, 6]]).lookup([1, 2], node_limit=9, depth=9)
    assert found == CountedTrie((3,), (-1,), (1,), 1, 2)


def test_a_match_does_not_begin_in_the_document_before(make: Make) -> None:
    found = make([[1, 2], [3, 4]]).lookup([1, 2, 3], node_limit=9, depth=9)
    assert found == CountedTrie((4,), (-1,), (1,), 1, 1)


def test_a_suffix_that_nothing_follows_gives_way_to_a_shorter_one(make: Make) -> None:
    found = make([[7, 8, 9], [9, 5]]).lookup([7, 8, 9], node_limit=9, depth=9)
    assert found == CountedTrie((5,), (-1,), (1,), 1, 1)


def test_of_many_occurrences_a_spread_few_are_read(make: Make) -> None:
    documents = [[10 + number % 7, 1, 20 + number % 7] for number in range(700)]
    index = make(documents, shard_tokens=250)
    found = index.lookup([1], node_limit=64, depth=4)
    assert found is not None
    assert found.occurrences == sum(found.counts) == MOST_READ
    assert set(found.tokens) == set(range(20, 27))
    assert min(found.counts) >= 5
    assert found == index.lookup([1], node_limit=64, depth=4)


def test_at_most_so_many_ids_are_matched(make: Make) -> None:
    text = list(range(45))
    found = make([text]).lookup(text[:40], node_limit=9, depth=2)
    assert found == CountedTrie((40, 41), (-1, 0), (1, 1), 1, LONGEST_MATCH)


@pytest.mark.parametrize("ids", [[], [49], [-1], [50], [0xFFFF], [2**40], [1, 99]])
def test_ids_that_are_not_there_give_nothing(ids: list[int], make: Make) -> None:
    assert make([[1, 2, 3]]).lookup(ids, node_limit=9, depth=9) is None


def test_ids_that_no_corpus_holds_end_the_suffix(make: Make) -> None:
    found = make([[1, 2, 3]]).lookup([0xFFFF, 1, 2], node_limit=9, depth=9)
    assert found is not None
    assert found.match_length == 2


@pytest.mark.parametrize(("limit", "depth"), [(0, 5), (5, 0), (-1, -1)])
def test_no_room_gives_nothing(limit: int, depth: int, make: Make) -> None:
    assert make([[1, 2, 3]]).lookup([1], node_limit=limit, depth=depth) is None


def test_the_longest_match_of_several_corpora_counts_and_equal_ones_add_up(tmp_path: Path) -> None:
    made = []
    for name, documents in {"a": [[1, 2, 3]], "b": [[1, 2, 3], [1, 2, 4]], "c": [[2, 9]]}.items():
        make_corpus(tmp_path / name, documents)
        made.append(CorpusIndex.open(tmp_path / name, DIGEST))
    both = Corpora(made)
    assert both.lookup([1, 2], node_limit=9, depth=9) == CountedTrie((3, 4), (-1, -1), (2, 1), 3, 2)
    assert both.lookup([8, 2], node_limit=9, depth=9) == CountedTrie((3, 4, 9), (-1, -1, -1), (2, 1, 1), 4, 1)
    assert Corpora([]).lookup([1], node_limit=9, depth=9) is None


def test_corpora_of_two_tokenizers_are_not_searched_together(tmp_path: Path) -> None:
    make_corpus(tmp_path / "a", [[1, 2]])
    make_corpus(tmp_path / "b", [[1, 2]], digest="e" * 64)
    with pytest.raises(WrongTokenizer) as error:
        Corpora([CorpusIndex.open(tmp_path / "a"), CorpusIndex.open(tmp_path / "b")])
    assert "d" * 64 in str(error.value)
    assert "e" * 64 in str(error.value)


def test_removing_and_closing_during_lookups_disturbs_none(folder: Path, make: Make) -> None:
    text = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    index = make([text], shard_tokens=5000)
    right = [(text[n - 9 : n], index.lookup(text[n - 9 : n], node_limit=20, depth=5)) for n in range(9, 900)]
    closed, wrong, answered = threading.Event(), [], []

    def look() -> None:
        while not closed.is_set():
            answered.append(0)
            for ids, answer in right:
                found = index.lookup(ids, node_limit=20, depth=5)
                if found is None:
                    return
                if found != answer:
                    wrong.append(ids)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    remove(folder)
    while len(answered) < 12:
        pass
    index.close()
    for thread in threads:
        thread.join(60)
    closed.set()
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert index.lookup(text[:5], node_limit=20, depth=5) is None


def test_an_index_stays_as_it_was_opened_when_its_path_is_built_anew(folder: Path, make: Make) -> None:
    before = make([[1, 2, 3]])
    after = make([[1, 2, 4]])
    answers = [index.lookup([1, 2], node_limit=1, depth=1) for index in (before, after)]
    assert [found.tokens for found in answers if found] == [(3,), (4,)]


def test_processes_that_read_the_same_index_see_the_same(folder: Path, make: Make) -> None:
    text = np.random.default_rng(3).integers(0, 9, 500).tolist()
    index = make([text])
    code = (
        "import sys, json, pathlib\n"
        "from retrieval_service.corpus.index import CorpusIndex\n"
        "index = CorpusIndex.open(pathlib.Path(sys.argv[1]))\n"
        "for ids in json.loads(sys.argv[2]):\n"
        "    print(index.lookup(ids, node_limit=16, depth=4))\n"
    )
    contexts = [text[start : start + 6] for start, _ in pairwise(range(0, 400, 20))]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(contexts)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    expected = "".join(f"{index.lookup(ids, node_limit=16, depth=4)}\n" for ids in contexts)
    assert [reader.communicate(timeout=200)[0] for reader in readers] == [expected, expected]


def test_warming_reads_and_changes_nothing(folder: Path, make: Make) -> None:
    index = make([[1, 2, 3]])
    index.warm()
    remove(folder)
    index.warm()
    assert index.lookup([1], node_limit=1, depth=1) is not None
