"""Time and size of corpora on disk: parts of `outrider bench retrieval`, not a benchmark of its own.

The text is synthetic and says nothing about acceptance. "zipf-copies" draws ids from a Zipf distribution
(exponent 1.2, cut at the vocabulary) in documents of 2,000 tokens. Half of each document are runs of 16 to
256 tokens copied from earlier documents, so that contexts recur and the suffixes of copies take long to
compare.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.shared.envelope import REPOSITORY, module_command
from retrieval_service.corpus.build import build
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.plan import SHARD_TOKENS, CorpusSettings

GENERATOR = "zipf-copies"
DIGEST = "0" * 64
DOCUMENT_TOKENS = 2_000
COPIED_FROM = 5_000
"""Earlier documents that runs are copied from."""
NODE_LIMIT, DEPTH = 64, 16
Ids = npt.NDArray[np.uint32]


class SyntheticText:
    """A `DocumentSource` for builds that yields `tokens` ids of a vocabulary, the same for the same seed."""

    again = True

    def __init__(self, tokens: int, vocabulary: int, seed: int = 0) -> None:
        self.name = f"{GENERATOR} {tokens} {vocabulary} {seed}"
        self.left_out: Counter[str] = Counter()
        self._tokens, self._seed = tokens, seed
        weights = 1.0 / np.arange(1, vocabulary + 1) ** 1.2
        self._sums = np.cumsum(weights / weights.sum())

    def __iter__(self) -> Iterator[Ids]:
        rng = np.random.default_rng(self._seed)
        kept: list[Ids] = []
        for number in range(-(-self._tokens // DOCUMENT_TOKENS)):
            ids = np.searchsorted(self._sums, rng.random(DOCUMENT_TOKENS)).astype(np.uint32)
            at = 0
            while kept and at < DOCUMENT_TOKENS:
                length, gap = (int(value) for value in rng.integers(16, 257, 2))
                source = kept[int(rng.integers(len(kept)))]
                begin = int(rng.integers(DOCUMENT_TOKENS - length))
                length = min(length, DOCUMENT_TOKENS - at)
                ids[at : at + length] = source[begin : begin + length]
                at += length + gap
            if len(kept) < COPIED_FROM:
                kept.append(ids)
            else:
                kept[number % COPIED_FROM] = ids
            yield ids[: self._tokens - number * DOCUMENT_TOKENS]

    def encode(self, documents: Sequence[Ids]) -> list[Ids | None]:
        """The documents as they are, since they are ids already."""
        return list(documents)

    def raw(self, document: Ids) -> bytes:
        """The document's bytes, by which a build recognises it."""
        return document.tobytes()


def build_figures(
    folder: Path, tokens: int, vocabulary: int, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """The field `build`: a build's seconds without the generator's, and peak MiB, in a process of its own."""
    numbers = (str(tokens), str(vocabulary), str(shard_tokens))
    command = module_command("retrieval.corpus_cost", str(folder.resolve()), *numbers)
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    seconds, generating, peak = (float(word) for word in done.stdout.split())
    header = CorpusIndex.open(folder, DIGEST).header
    return {
        "tokens": header.tokens,
        "seconds": round(seconds, 2),
        "generating_seconds": round(generating, 2),
        "tokens_per_second": round(header.tokens / seconds),
        "peak_mb": round(peak, 1),
        "bytes_per_token": round(header.size / header.tokens, 3),
        "shards": len(header.shards),
    }


def draw_contexts(tokens: int, vocabulary: int, count: int) -> list[list[int]]:
    """Contexts of 64 tokens: three in four occur in the corpus, and every fifth ends with a random token."""
    rng = np.random.default_rng(1)
    stored: list[Ids] = []
    every = max(1, tokens // DOCUMENT_TOKENS // 400)
    for number, document in enumerate(SyntheticText(tokens, vocabulary)):
        if number % every == 0 and len(document) == DOCUMENT_TOKENS:
            stored.append(document)
    fresh = list(SyntheticText(DOCUMENT_TOKENS * 100, vocabulary, seed=2))
    made = []
    for number in range(count):
        documents = fresh if number % 4 == 3 else stored
        document = documents[int(rng.integers(len(documents)))]
        end = int(rng.integers(64, DOCUMENT_TOKENS - 1))
        ids = document[end - 64 : end].tolist()
        made.append([*ids, int(rng.integers(vocabulary))] if number % 5 == 4 else ids)
    return made


def lookup_figures(folder: Path, contexts: Sequence[Sequence[int]], repeats: int = 5) -> dict[str, Any]:
    """The field `lookup_ms`: wall and processor time of warm lookups, each context once in each repeat."""
    index = CorpusIndex.open(folder, DIGEST)
    index.warm()
    for ids in contexts:
        index.lookup(ids, node_limit=NODE_LIMIT, depth=DEPTH)
    wall, processor, lengths = [], [], []
    for _ in range(repeats):
        for ids in contexts:
            began, spent = time.perf_counter_ns(), time.thread_time_ns()
            found = index.lookup(ids, node_limit=NODE_LIMIT, depth=DEPTH)
            processor.append((time.thread_time_ns() - spent) / 1e6)
            wall.append((time.perf_counter_ns() - began) / 1e6)
            lengths.append(found.match_length if found else 0)
    return {
        **_quantiles(wall),
        "processor": _quantiles(processor),
        "median_match": statistics.median(lengths),
        "lookups": len(wall),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4)}


def _build(folder: Path, tokens: int, vocabulary: int, shard_tokens: int) -> None:
    built = build(
        folder, CorpusSettings(DIGEST, vocabulary, None, shard_tokens), SyntheticText(tokens, vocabulary)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(built.index_seconds, built.encode_seconds, peak)


if __name__ == "__main__":
    _build(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:]))
