"""Builds: what they hold, how they go on, and what is there when one ends in the middle."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from corpora import DIGEST, Documents, Unsynced, documents_in, make_corpus

from retrieval_service.corpus.errors import (
    BadSource,
    CorpusError,
    Damaged,
    Held,
    NoCorpus,
    OutOfSpace,
    WrongTokenizer,
)
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.layout import read_header
from retrieval_service.corpus.lock import held
from retrieval_service.corpus.manage import describe, discard, merge, remove, verify
from retrieval_service.corpus.plan import CorpusSettings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def texts(seed: int, count: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, int(rng.integers(1, 40))).tolist() for _ in range(count)]


class Failing(Unsynced):
    """A Disk that refuses every write from the nth on."""

    def __init__(self, writes: int, error: int) -> None:
        self.left, self.error = writes, error

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.error, os.strerror(self.error))
        super().write(file, data)


def test_a_corpus_holds_its_documents_in_order(folder: Path) -> None:
    documents = [*texts(0), [], [7]]
    built = make_corpus(folder, documents, shard_tokens=64)
    assert documents_in(folder) == [document for document in documents if document]
    assert verify(folder) == built.header
    assert built.header.tokens == sum(map(len, documents))
    assert len(built.header.shards) > 5


def test_a_document_longer_than_a_shard_is_cut(folder: Path) -> None:
    text = list(range(45))
    make_corpus(folder, [[1], text], shard_tokens=20)
    assert documents_in(folder) == [[1], text[:19], text[19:38], text[38:]]


@pytest.mark.parametrize("documents", [[], [[]], [[5]], [[5], [6]]])
def test_a_corpus_of_next_to_nothing_can_be_looked_up(documents: list[list[int]], folder: Path) -> None:
    make_corpus(folder, documents)
    assert CorpusIndex.open(folder, DIGEST).lookup([5], node_limit=9, depth=9) is None
    assert verify(folder).tokens == sum(map(len, documents))


@pytest.mark.parametrize("rubbish", ["", "[[[", "[" * 100_000, "3", "[]", "{}", '{"checksum": 1}'])
def test_a_header_that_is_rubbish_is_damaged(rubbish: str, folder: Path) -> None:
    make_corpus(folder, [[1, 2]])
    (folder / "header.json").write_text(rubbish)
    with pytest.raises(Damaged, match=r"header\.json"):
        describe(folder)
    with pytest.raises(Damaged, match="remove the corpus first"):
        make_corpus(folder, [[1, 2]])
    remove(folder)
    make_corpus(folder, [[1, 2]])


def test_an_empty_corpus_never_takes_the_place_of_one_that_holds_something(folder: Path) -> None:
    make_corpus(folder, [[], []])
    make_corpus(folder, [[]])
    make_corpus(folder, [[1, 2]])
    with pytest.raises(BadSource, match="nothing to index"):
        make_corpus(folder, [[]])
    assert documents_in(folder) == [[1, 2]]
    assert describe(folder).unfinished is None


@pytest.mark.parametrize("before", [[], [[7, 8]]])
def test_what_an_unfinished_build_has_left_can_be_discarded(before: list[list[int]], folder: Path) -> None:
    if before:
        make_corpus(folder, before)
    with pytest.raises(OutOfSpace):
        make_corpus(folder, texts(0), shard_tokens=64, disk=Failing(30, errno.ENOSPC))
    assert list(folder.glob("*-00001.text"))
    discard(folder)
    discard(folder)
    assert documents_in(folder) == before if before else not folder.exists()
    assert len(list(folder.glob("*"))) == (5 if before else 0)


def test_a_build_under_way_is_not_discarded(folder: Path) -> None:
    make_corpus(folder, [[1, 2]])
    with held(folder), pytest.raises(Held):
        discard(folder)


def test_a_new_corpus_takes_the_old_ones_place_whole(folder: Path) -> None:
    make_corpus(folder, texts(0), shard_tokens=64)
    built = make_corpus(folder, [[1, 2]], tenant="acme")
    assert (built.header.generation, built.header.tenant) == (2, "acme")
    assert {path.name for path in folder.iterdir()} == {*built.header.names, "header.json", "lock"}


def test_asked_with_another_tokenizer_it_is_refused_naming_both(folder: Path) -> None:
    make_corpus(folder, [[1, 2]])
    with pytest.raises(WrongTokenizer) as error:
        CorpusIndex.open(folder, "f" * 64)
    assert "d" * 64 in str(error.value)
    assert "f" * 64 in str(error.value)


@pytest.mark.slow
def test_builds_killed_at_any_point_leave_the_old_corpus_or_the_new(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, HERE / "support/killed_builds.py", tmp_path, "200"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["killed"] >= 200
    assert found["old"] + found["new"] + found["none"] == 400
    assert min(found["old"], found["new"], found["none"]) > 5
    assert found["said under construction"] > 0.9 * found["none"]
    assert found["said unfinished"] > 10
    assert found["shards kept"] > 100


def test_a_build_goes_on_after_its_last_complete_shard(folder: Path) -> None:
    documents = texts(4)
    with pytest.raises(CorpusError):
        make_corpus(folder, documents, shard_tokens=64, disk=Failing(20, errno.EIO))
    left = describe(folder)
    assert left.header is None
    assert left.unfinished is not None
    source = Documents(documents)
    built = make_corpus(folder, source, shard_tokens=64)
    assert built.kept_shards == len(left.unfinished.shards) > 0
    assert source.encoded < len(documents)
    assert documents_in(folder) == documents


def test_a_long_document_goes_on_in_its_middle(folder: Path) -> None:
    documents = [[1, 2], list(range(45)) * 4, [3, 4]]
    with pytest.raises(CorpusError):
        make_corpus(folder, documents, shard_tokens=20, disk=Failing(15, errno.EIO))
    built = make_corpus(folder, documents, shard_tokens=20)
    assert built.kept_shards > 1
    whole = make_corpus(folder.with_name("whole"), documents, shard_tokens=20)
    assert built.header == whole.header


@pytest.mark.parametrize("again", [True, False])
def test_what_changed_since_the_interruption_is_not_mixed(again: bool, folder: Path) -> None:
    with pytest.raises(CorpusError):
        make_corpus(folder, texts(5), shard_tokens=64, disk=Failing(20, errno.EIO))
    other = Documents(texts(6), again=again)
    if not again:
        with pytest.raises(BadSource, match="standard input is not what it was"):
            make_corpus(folder, other, shard_tokens=64)
    assert make_corpus(folder, other, shard_tokens=64).kept_shards == 0
    assert documents_in(folder) == texts(6)


def test_other_settings_begin_anew(folder: Path) -> None:
    with pytest.raises(CorpusError):
        make_corpus(folder, texts(5), shard_tokens=64, disk=Failing(20, errno.EIO))
    assert make_corpus(folder, texts(5), shard_tokens=65).kept_shards == 0
    assert documents_in(folder) == texts(5)


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4, 9, 30])
def test_a_full_disk_is_told_and_leaves_the_old_corpus(writes: int, folder: Path) -> None:
    old = make_corpus(folder, texts(0), shard_tokens=64).header
    with pytest.raises(OutOfSpace, match="no room on the disk"):
        make_corpus(folder, texts(1), shard_tokens=64, disk=Failing(writes, errno.ENOSPC))
    assert verify(folder) == old
    assert documents_in(folder) == texts(0)
    make_corpus(folder, texts(1), shard_tokens=64)
    assert documents_in(folder) == texts(1)


def test_a_second_builder_is_refused_and_told_of_the_first(folder: Path) -> None:
    folder.mkdir()
    with held(folder):
        for refused in (lambda: make_corpus(folder, [[1, 2]]), lambda: remove(folder)):
            with pytest.raises(Held, match=f"process {os.getpid()} on .* since"):
                refused()
    make_corpus(folder, [[1, 2]])


def test_a_path_under_construction_never_opens(folder: Path) -> None:
    with pytest.raises(CorpusError):
        make_corpus(folder, texts(5), shard_tokens=64, disk=Failing(20, errno.EIO))
    with pytest.raises(NoCorpus, match="under construction"):
        CorpusIndex.open(folder)


def test_a_folder_with_anything_else_in_it_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(CorpusError, match=r"thesis\.txt"):
        make_corpus(folder, [[1]])
    with pytest.raises(NoCorpus, match="no corpus"):
        remove(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_lock_that_cannot_be_made_is_reported(folder: Path) -> None:
    (folder / "lock").mkdir(parents=True)
    with pytest.raises(CorpusError, match="cannot be written"):
        make_corpus(folder, [[1]])


def test_a_path_that_is_a_file_is_refused(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(CorpusError, match="cannot be a folder"):
        make_corpus(folder, [[1]])
    with pytest.raises(NoCorpus, match="no corpus"):
        CorpusIndex.open(folder)


@pytest.mark.parametrize(
    "settings", [{"vocabulary": 0}, {"vocabulary": 2**24}, {"shard_tokens": 1}, {"tenant": ""}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(BadSource):
        CorpusSettings(**{"tokenizer": DIGEST, "vocabulary": 9, "tenant": None, **settings})  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_never_enter_a_corpus(folder: Path) -> None:
    with pytest.raises(ValueError, match="50 is outside"):
        make_corpus(folder, [[50]])
    with pytest.raises(NoCorpus):
        read_header(folder)


def test_merging_keeps_every_document_in_fewer_shards(tmp_path: Path) -> None:
    for number in range(3):
        make_corpus(tmp_path / f"{number}", texts(number), shard_tokens=64)
    built = merge(tmp_path / "all", [tmp_path / f"{number}" for number in range(3)])
    assert documents_in(tmp_path / "all") == [*texts(0), *texts(1), *texts(2)]
    assert len(built.header.shards) == 1
    merge(tmp_path / "0", [tmp_path / "0", tmp_path / "1"])
    assert documents_in(tmp_path / "0") == [*texts(0), *texts(1)]


def test_only_corpora_of_one_tokenizer_and_owner_are_merged(tmp_path: Path) -> None:
    make_corpus(tmp_path / "a", [[1, 2]])
    make_corpus(tmp_path / "b", [[1, 2]], digest="e" * 64)
    make_corpus(tmp_path / "c", [[1, 2]], tenant="acme")
    with pytest.raises(WrongTokenizer, match="e" * 64):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(BadSource, match=r"'acme'.* everybody"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "c"])
    assert not (tmp_path / "out").exists()


def test_what_is_removed_is_gone(folder: Path) -> None:
    make_corpus(folder, texts(0), shard_tokens=64)
    remove(folder)
    assert not folder.exists()
    with pytest.raises(NoCorpus):
        remove(folder)


class TestDamage:
    """A corpus whose files were changed after the build."""

    @pytest.fixture
    def built(self, folder: Path) -> Path:
        make_corpus(folder, texts(0), shard_tokens=400)
        return folder

    @pytest.mark.parametrize("kind", ["text", "suffixes", "directory"])
    def test_a_file_cut_short_is_refused_by_name(self, kind: str, built: Path) -> None:
        path = built / f"000001-00000.{kind}"
        os.truncate(path, path.stat().st_size - 1)
        for refused in (lambda: CorpusIndex.open(built), lambda: verify(built)):
            with pytest.raises(Damaged, match=rf"00000\.{kind}: damaged: \d+ bytes, not \d+"):
                refused()

    @pytest.mark.parametrize("kind", ["text", "suffixes", "directory"])
    def test_a_missing_file_is_refused_by_name(self, kind: str, built: Path) -> None:
        (built / f"000001-00001.{kind}").unlink()
        for refused in (lambda: CorpusIndex.open(built), lambda: verify(built)):
            with pytest.raises(Damaged, match=rf"00001\.{kind}"):
                refused()

    @pytest.mark.parametrize("kind", ["text", "suffixes", "directory"])
    @pytest.mark.parametrize("seed", range(5))
    def test_verifying_finds_a_flipped_bit_and_says_where(self, kind: str, seed: int, built: Path) -> None:
        path = built / f"000001-00000.{kind}"
        data = bytearray(path.read_bytes())
        rng = np.random.default_rng(seed)
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(Damaged, match=rf"00000\.{kind}: damaged: its checksum"):
            verify(built)
        with pytest.raises(Damaged):
            merge(built.with_name("out"), [built])

    @pytest.mark.parametrize("seed", range(20))
    def test_a_header_with_a_flipped_bit_never_opens(self, seed: int, built: Path) -> None:
        path = built / "header.json"
        data = bytearray(path.read_bytes())
        rng = np.random.default_rng(seed)
        at = int(rng.choice([n for n, byte in enumerate(data) if chr(byte) not in " \n"]))
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(Damaged, match=r"header\.json"):
            CorpusIndex.open(built)
        with pytest.raises(Damaged, match="remove the corpus first"):
            make_corpus(built, [[1]])
        remove(built)
        assert not built.exists()

    def test_lookups_in_damaged_bytes_answer_something_or_nothing(self, built: Path) -> None:
        for file in sorted(read_header(built).names):
            data = np.frombuffer((built / file).read_bytes(), dtype=np.uint8)
            (built / file).write_bytes(np.random.default_rng(0).permutation(data).tobytes())
        damaged = CorpusIndex.open(built)
        for document in texts(0):
            for end in range(1, len(document)):
                found = damaged.lookup(document[:end], node_limit=9, depth=9)
                assert found is None or max(found.tokens) < 50

    def test_a_later_format_is_refused_by_its_version(self, built: Path) -> None:
        from retrieval_service.corpus.layout import sealed, unsealed

        said = unsealed(built / "header.json") | {"version": 3}
        (built / "header.json").write_bytes(sealed(said))
        with pytest.raises(NoCorpus, match=r"version 3; this program reads .* version 2"):
            CorpusIndex.open(built)
