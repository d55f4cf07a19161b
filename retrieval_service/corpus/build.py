"""Building a corpus: documents in, shards out, and a header that makes them one.

A build writes files of names that no finished corpus uses, notes each shard when it is complete, and puts the
new header in the old one's place as its last step but for removing what the old one named. Ended at any
moment, it leaves the old state or the new one; the next build of the same goes on after the last complete
shard.
"""

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Generic

from retrieval_service.corpus.disk import Disk, make_folder
from retrieval_service.corpus.encoding import DocumentSource, Ids, T
from retrieval_service.corpus.errors import BadSource, CorpusError, OutOfSpace
from retrieval_service.corpus.layout import BUILD, HEADER, LOCK, CorpusHeader, ShardRecord, is_ours, sealed
from retrieval_service.corpus.lock import held
from retrieval_service.corpus.plan import (
    BuildProgress,
    Built,
    CorpusSettings,
    State,
    check_replaced,
    name_of,
    new_hash,
    old_header,
    source_digest,
    unfinished,
)
from retrieval_service.corpus.shard import ShardWriter

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Changed(Exception):
    """The documents differ from those that the unfinished build has read."""


def build(
    folder: Path,
    settings: CorpusSettings,
    source: DocumentSource[T],
    *,
    disk: Disk | None = None,
    report: Callable[[BuildProgress], None] = lambda progress: None,
    empty: bool = True,
    replace: bool = True,
) -> Built:
    """Makes `folder` a corpus of the documents of `source`; one that is there stays until this is complete.

    Raises CorpusError: Held, OutOfSpace, BadSource, and WouldReplace where `replace` is False and the folder
    holds a corpus of another source or owner. Whatever ends it, the next call with the same settings and
    source goes on after the last complete shard. A corpus without an id never takes the place of one that has
    some, and is none at all where `empty` is False: BadSource.
    """
    make_folder(folder)
    foreign = sorted(path.name for path in folder.iterdir() if not is_ours(path.name))
    if foreign:
        raise CorpusError(
            f"{folder}: holds {foreign[0]!r}, which is no part of a corpus: choose another folder"
        )
    with held(folder):
        if not replace and (old := old_header(folder)) is not None:
            check_replaced(folder, old, settings.tenant, source.name, again=source.again)
        work = _Build(folder, settings, source, disk or Disk(), report, empty)
        try:
            return work.run()
        except OSError as error:
            work.abandon()
            if error.errno in FULL:
                raise OutOfSpace(
                    f"{folder}: no room on the disk ({error.strerror}) after {work.tokens} tokens; what was"
                    " there before is as it was; make room and build again: complete shards are kept"
                ) from error
            raise CorpusError(f"{folder}: cannot be written: {error}") from error
        except BaseException:
            work.abandon()
            raise


class _Build(Generic[T]):
    def __init__(
        self,
        folder: Path,
        settings: CorpusSettings,
        source: DocumentSource[T],
        disk: Disk,
        report: Callable[[BuildProgress], None],
        empty: bool,
    ) -> None:
        self._folder, self._settings = folder, settings
        self._source: DocumentSource[T] = source
        self._disk, self._report = disk, report
        self._old = old_header(folder)
        self._empty = empty and not (self._old and self._old.tokens)
        self._shard: ShardWriter | None = None
        self._hash = new_hash()
        self._state = self._begin()
        self._encode_seconds = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens that the build has taken so far."""
        return sum(shard.tokens for shard in self._state.shards) + (self._shard.tokens if self._shard else 0)

    def run(self) -> Built:
        started = time.perf_counter()
        try:
            kept = self._take_all()
        except _Changed:
            self._disk.remove(self._folder / BUILD)
            if not self._source.again:
                raise BadSource(
                    "standard input is not what it was when this build was interrupted;"
                    " run again to begin anew"
                ) from None
            self._state, self._hash = self._begin(), new_hash()
            kept = self._take_all()
        header = self._commit()
        spent = time.perf_counter() - started
        left_out = Counter({"near-copies": self._state.copies}) + self._source.left_out
        return Built(header, kept, dict(left_out), self._encode_seconds, spent - self._encode_seconds)

    def abandon(self) -> None:
        """Removes the unfinished shard's file if the disk allows; otherwise the next build removes it."""
        if self._shard is not None:
            try:
                self._shard.abandon()
            except OSError:
                return

    def _begin(self) -> State:
        """The state of an unfinished build of the same corpus, or a new state; removes all other files."""
        name = name_of(self._settings, self._source.name)
        state = State(name, self._old.generation + 1 if self._old else 1)
        left = unfinished(self._folder)
        if left is not None and (left.name, left.generation) == (state.name, state.generation):
            state = left
        self._clear(state.shards)
        return state

    def _clear(self, shards: Sequence[ShardRecord]) -> None:
        wanted = {file.name for shard in shards for file in shard.files} | {HEADER, LOCK}
        wanted |= {BUILD} if shards else set()
        wanted |= self._old.names if self._old else frozenset()
        for path in self._folder.iterdir():
            if path.name not in wanted:
                self._disk.remove(path)

    def _take_all(self) -> int:
        kept = len(self._state.shards)
        documents = iter(self._source)
        for document in islice(documents, self._state.documents):
            self._note(document)
        if self._hash.hexdigest() != self._state.read:
            raise _Changed
        for batch in self._batches(documents):
            started = time.perf_counter()
            encoded = self._source.encode(batch)
            self._encode_seconds += time.perf_counter() - started
            for document, ids in zip(batch, encoded, strict=True):
                self._take(document, ids)
            self._say("reading")
        if self._shard is not None:
            self._complete(self._shard)
        return kept

    def _batches(self, documents: Iterator[T]) -> Iterator[list[T]]:
        batch: list[T] = []
        size = 0
        started = time.perf_counter()
        for document in documents:
            batch.append(document)
            size += len(document)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                self._encode_seconds += time.perf_counter() - started
                yield batch
                batch, size = [], 0
                started = time.perf_counter()
        self._encode_seconds += time.perf_counter() - started
        if batch:
            yield batch

    def _take(self, document: T, ids: Ids | None) -> None:
        state = self._state
        if ids is None:
            state.copies += 1
        else:
            limit = self._settings.shard_tokens
            while state.offset < len(ids):
                rest = len(ids) - state.offset
                if self._shard is not None and self._shard.room <= min(rest, limit - 1):
                    self._complete(self._shard)
                shard = self._shard = self._shard or self._next_shard()
                taken = min(rest, limit - 1)
                shard.add(ids[state.offset : state.offset + taken])
                state.offset += taken
        self._note(document)
        state.documents, state.offset = state.documents + 1, 0
        state.read = self._hash.copy().hexdigest()

    def _note(self, document: T) -> None:
        raw = self._source.raw(document)
        self._hash.update(len(raw).to_bytes(8))
        self._hash.update(raw)

    def _next_shard(self) -> ShardWriter:
        stem = f"{self._state.generation:06}-{len(self._state.shards):05}"
        settings = self._settings
        return ShardWriter(self._disk, self._folder, stem, settings.vocabulary, settings.shard_tokens)

    def _complete(self, shard: ShardWriter) -> None:
        self._say("sorting")
        self._state.shards.append(shard.finish())
        self._shard = None
        self._disk.sync_folder(self._folder)
        self._disk.put(self._folder / BUILD, sealed(asdict(self._state)))

    def _commit(self) -> CorpusHeader:
        settings, state = self._settings, self._state
        if not state.shards and not self._empty:
            raise BadSource(
                f"{self._folder}: there is nothing to index: no document has an id; what was there stays"
            )
        header = CorpusHeader(
            state.generation,
            settings.tokenizer,
            settings.vocabulary,
            settings.tenant,
            source_digest(self._source.name),
            tuple(state.shards),
        )
        self._disk.put(self._folder / HEADER, header.to_json())
        self._old = None
        self._clear(state.shards)
        self._disk.remove(self._folder / BUILD)
        return header

    def _say(self, stage: str) -> None:
        self._report(BuildProgress(self._state.documents, self.tokens, len(self._state.shards), stage))
