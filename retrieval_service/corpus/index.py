"""A corpus on disk, opened: mapped, searched, closed."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from retrieval_service.corpus.errors import CorpusError, Damaged, WrongTokenizer
from retrieval_service.corpus.layout import ENTRY_IDS, CorpusHeader, FileRecord, ShardRecord, read_header
from retrieval_service.corpus.search import Shard, look_up
from retrieval_service.trie import CountedTrie

ATTEMPTS = 5
READ_BYTES = 8 << 20


class CorpusIndex:
    """A complete corpus, mapped. It stays as it was opened when its path is built anew, or removed.

    Any number of threads and processes may look up at once.
    """

    def __init__(self, path: Path, header: CorpusHeader, shards: Sequence[Shard]) -> None:
        self.path = path
        self.header = header
        self._shards = tuple(shards)

    @classmethod
    def open(cls, path: Path, tokenizer_digest: str | None = None) -> Self:
        """Checks the header's checksum and the files' lengths; `verify` checks every byte.

        Raises NoCorpus, Damaged, and WrongTokenizer where `tokenizer_digest` is given and not the one that it
        was built with.
        """
        for _ in range(ATTEMPTS):
            header = read_header(path)
            if tokenizer_digest is not None and tokenizer_digest != header.tokenizer:
                raise WrongTokenizer(
                    f"{path}: built with the tokenizer of digest {header.tokenizer}, asked with that of"
                    f" digest {tokenizer_digest}: build it anew with the target's own tokenizer"
                )
            try:
                return cls(
                    path, header, [_map(path, shard, header) for shard in header.shards if shard.positions]
                )
            except FileNotFoundError as error:
                if read_header(path) == header:
                    raise Damaged(f"{error.filename}: missing, but named in the header") from None
                # Built anew since the header was read: its successor is there.
            except OSError as error:
                raise Damaged(f"{error.filename or path}: cannot be mapped: {error.strerror}") from error
        raise CorpusError(f"{path}: built anew faster than it can be opened")

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """Looks a context up in this corpus; see `Memory` and `look_up`. None after `close`."""
        return look_up(self._shards, ids, node_limit=node_limit, depth=depth)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The mapped shards, to search together with other corpora's; empty after `close`."""
        return self._shards

    def warm(self) -> None:
        """Reads all files once, to fill the page cache. Other threads run meanwhile."""
        buffer = bytearray(READ_BYTES)
        for name in sorted(self.header.names):
            try:
                with open(self.path / name, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
            except FileNotFoundError:
                return  # removed or built anew; the mapped files stay

    def close(self) -> None:
        """Drops the mapped shards; lookups under way finish, and the last of them unmaps the memory."""
        self._shards = ()


class Corpora:
    """Several corpora of one tokenizer, searched as if they were one: the longest match of all counts."""

    def __init__(self, indexes: Sequence[CorpusIndex]) -> None:
        """Joins corpora. Raises WrongTokenizer where their tokenizers differ."""
        self._indexes = tuple(indexes)
        for index in self._indexes[1:]:
            first = self._indexes[0]
            if index.header.tokenizer != first.header.tokenizer:
                raise WrongTokenizer(
                    f"{index.path}: built with the tokenizer of digest {index.header.tokenizer},"
                    f" {first.path} with that of digest {first.header.tokenizer}: they cannot be"
                    " searched together"
                )

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """Looks a context up in all corpora; see `Memory` and `look_up`."""
        shards = [shard for index in self._indexes for shard in index.shards]
        return look_up(shards, ids, node_limit=node_limit, depth=depth)


def _map(folder: Path, shard: ShardRecord, header: CorpusHeader) -> Shard:
    directory = _mapped(folder, shard.directory)[:]
    size = ENTRY_IDS * header.width
    return Shard(
        text=_mapped(folder, shard.text),  # type: ignore[arg-type]  # slices of a mapping are bytes
        suffixes=memoryview(_mapped(folder, shard.suffixes)).cast("I"),
        directory=[directory[start : start + size] for start in range(0, len(directory), size)],
        width=header.width,
        vocabulary=header.vocabulary,
    )


def _mapped(folder: Path, file: FileRecord) -> mmap.mmap:
    with open(folder / file.name, "rb") as opened:
        found = os.fstat(opened.fileno()).st_size
        if found != file.bytes:
            raise Damaged(f"{folder / file.name}: damaged: {found} bytes, not {file.bytes}")
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped
