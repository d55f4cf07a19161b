"""`python -m retrieval_service.building.ingest`: builds a corpus of spooled documents in its own process.

Sorting a large text takes seconds of all the interpreter has, which lookups cannot wait for. Reads its task
from the arguments, prints one JSON object: the number of tokens, or an error.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.runtime.lifeline import die_with_parent_from_flags
from outrider.tokens import TokenTable
from retrieval_service.corpus.bounded_disk import BoundedDisk
from retrieval_service.corpus.build import build
from retrieval_service.corpus.encoding import Ids
from retrieval_service.corpus.plan import CorpusSettings
from speculative.errors import OutriderError

NICENESS = 10


class Spooled:
    """Documents of a spool: a line of JSON each, `{"text": ...}` or `{"ids": [...]}`. A Source of lines."""

    again = True

    def __init__(self, spool: Path, table: TokenTable) -> None:
        self.name = str(spool)
        self.left_out: Counter[str] = Counter()
        self._spool = spool
        self._tokenizer = Tokenizer.from_str(table.to_json())

    def __iter__(self) -> Iterator[str]:
        with self._spool.open(encoding="utf-8") as lines:
            yield from lines

    def encode(self, documents: Sequence[str]) -> list[Ids | None]:
        """The token ids of each line's document; text is tokenized."""
        parsed = [json.loads(document) for document in documents]
        texts = [one["text"] for one in parsed if "text" in one]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            np.array(next(encoded).ids if "text" in one else one["ids"], dtype=np.uint32) for one in parsed
        ]

    def raw(self, document: str) -> bytes:
        """Bytes that identify a document: its line."""
        return document.encode()


def main(arguments: Sequence[str]) -> int:
    """Builds a corpus from FOLDER SPOOL TOKENIZER OWNER (empty: everybody) MOST_MB; returns the exit status.

    MOST_MB bounds the corpora of the owner together.
    """
    folder, spool, tokenizer, owner, most_mb = arguments
    os.nice(NICENESS)
    try:
        table = TokenTable.from_json(Path(tokenizer).read_text(encoding="utf-8"))
        source = Spooled(Path(spool), table)
        settings = CorpusSettings(table.digest, table.size, owner or None)
        disk = BoundedDisk(Path(folder), int(most_mb))
        built = build(Path(folder), settings, source, disk=disk, empty=False)
    except OutriderError as error:
        code = getattr(error, "code", "INTERNAL")
        print(json.dumps({"error": {"code": code, "message": str(error)}}))
        return 1
    print(json.dumps({"tokens": built.header.tokens}))
    return 0


if __name__ == "__main__":
    die_with_parent_from_flags(sys.argv[1:3])
    raise SystemExit(main(sys.argv[3:]))
