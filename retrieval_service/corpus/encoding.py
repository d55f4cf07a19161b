"""Documents as token ids: text through a tokenizer, or what other corpora hold."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from outrider.near_copies import KeptOut
from outrider.tokens import TokenTable
from retrieval_service.corpus.errors import BadSource, Damaged
from retrieval_service.corpus.layout import CorpusHeader
from retrieval_service.corpus.suffixes import CHUNK
from retrieval_service.corpus.texts import TextSource

Ids = npt.NDArray[np.uint32]
T = TypeVar("T", str, Ids)


class DocumentSource(Protocol[T]):
    """The documents of a build, in the same order every time, so that an unfinished build can go on."""

    @property
    def name(self) -> str:
        """Identifies the inputs and how they are read: a build resumes only under the same name."""

    @property
    def again(self) -> bool:
        """Whether the documents can be read a second time from the beginning."""

    @property
    def left_out(self) -> Counter[str]:
        """Number of inputs that were left out because they are no documents, by reason."""

    def __iter__(self) -> Iterator[T]: ...

    def encode(self, documents: Sequence[T]) -> list[Ids | None]:
        """The token ids of each document; None for a document to leave out."""

    def raw(self, document: T) -> bytes:
        """Bytes that identify a document, by which a resumed build recognises it."""


class TokenizedText:
    """Texts of a `TextSource` as a tokenizer's ids, without special tokens, near-copies left out."""

    def __init__(self, texts: TextSource, table: TokenTable, exclude: TextSource | None = None) -> None:
        self._texts = texts
        self._tokenizer = Tokenizer.from_str(table.to_json())
        self._kept_out: KeptOut | None = None
        known = hashlib.blake2b(digest_size=32)
        if exclude is not None:
            documents = list(exclude)
            for document in documents:
                known.update(self.raw(document) + b"\xff")
            self._kept_out = KeptOut(self._ids(documents))
        paths = [str(path.absolute()) for path in texts.paths]
        settings = [paths, texts.globs, texts.jsonl_field, texts.stdin is not None, known.hexdigest()]
        self.name = json.dumps(settings)
        self.again = texts.again
        self.left_out = texts.left_out

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def encode(self, documents: Sequence[str]) -> list[Ids | None]:
        """The token ids of each text; None for a text to leave out."""
        return [self._kept(ids) for ids in self._ids(documents)]

    def raw(self, document: str) -> bytes:
        """Bytes that identify a text."""
        return document.encode()

    def _kept(self, ids: Ids) -> Ids | None:
        return None if self._kept_out is not None and self._kept_out.nearly_copied_by(ids) else ids

    def _ids(self, documents: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


class StoredDocuments:
    """The documents of existing corpora, as token ids."""

    again = True

    def __init__(self, corpora: Sequence[tuple[Path, CorpusHeader]]) -> None:
        self._corpora = corpora
        self.name = json.dumps([header.to_json().decode() for _, header in corpora])
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Ids]:
        for folder, header in self._corpora:
            for shard in header.shards:
                yield from _documents(folder / shard.text.name, header.width)

    def encode(self, documents: Sequence[Ids]) -> list[Ids | None]:
        """The token ids of each stored document; None for a document to leave out."""
        return list(documents)

    def raw(self, document: Ids) -> bytes:
        """Bytes that identify a stored document."""
        return document.tobytes()


def _documents(path: Path, width: int) -> Iterator[Ids]:
    separator = 2 ** (8 * width) - 1
    begun: list[Ids] = []
    try:
        with open(path, "rb") as file:
            while data := file.read(CHUNK * width):
                part = np.frombuffer(data, dtype=f">u{width}").astype(np.uint32)
                begins = 0
                for end in np.flatnonzero(part == separator).tolist():
                    yield np.concatenate([*begun, part[begins:end]])[::-1]
                    begun, begins = [], end + 1
                begun.append(part[begins:])
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read: {error}") from error


def read_tokenizer(path: Path) -> TokenTable:
    """The tokenizer in a `tokenizer.json`, or in a folder that has one. Raises BadSource."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return TokenTable.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSource(f"{file}: no tokenizer: {error}") from error
