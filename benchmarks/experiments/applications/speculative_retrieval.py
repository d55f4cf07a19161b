"""X19: speculative retrieval. Documents are guessed from a cache and checked in batches, on a virtual clock.

Every INTERVAL tokens the document that fits the text best is looked up (Zhang and others, *RaLMSpec*, arXiv
2401.14021). Queries and documents are real text; what the model would write behind a document is not
decoded: held-out text stands for it, so a wrong guess costs time and changes no later query.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.alignment.pupils import school_of
from benchmarks.experiments.chains import run_length
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, where
from benchmarks.experiments.pair import MOST_HELD_OUT, ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from benchmarks.shared.resumable import Key

INTERVAL, QUERY, DOCUMENT = 8, 48, 128
"""Tokens between two queries, of a query and of a document."""
TOKEN_MS = 7.0
"""Milliseconds of a token without drafts: the embedded target's, roughly."""
SEARCHES_MS = (1.0, 10.0, 30.0, 100.0)
STRIDES = range(1, 17)
PREFETCHED = (1, 20)
"""Documents of each search that the cache takes in, by arm."""
WAYS = ("batched", "overlapped")
"""Several guesses checked by one search; or the next interval written while the search runs."""
Vectors = NDArray[np.float32]


@cache
def documents(target: Path) -> tuple[Vectors, Vectors]:
    """Unit vectors of the documents by weighted words, float32 [n, V], and the words' weights, [V]."""
    ids = school_of(target).source
    parts = ids[: len(ids) // DOCUMENT * DOCUMENT].reshape(-1, DOCUMENT)
    counts = np.zeros((len(parts), int(ids.max()) + 1), dtype=np.float32)
    np.add.at(counts, (np.arange(len(parts))[:, None], parts), 1)
    weights = np.log(len(parts) / (1 + (counts > 0).sum(0))).clip(0).astype(np.float32)
    vectors = np.sqrt(counts) * weights
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-6), weights


def scores_of(target: Path, query: Sequence[int]) -> Vectors:
    """How well each document fits a query, float32 [n]."""
    vectors, weights = documents(target)
    counts = np.bincount([token for token in query if token < len(weights)], minlength=len(weights))
    found: Vectors = vectors @ (np.sqrt(counts) * weights).astype(np.float32)
    return found


def guesses(target: Path, prompt: Sequence[int], rest: Sequence[int], prefetched: int) -> list[bool]:
    """For each query of a text: whether the best document of the cache is the best one of all.

    The cache holds the `prefetched` best documents of each earlier query of this text.
    """
    ids = [*prompt, *rest]
    cache: set[int] = set()
    right = []
    for place in range(len(prompt), len(ids), INTERVAL):
        scores = scores_of(target, ids[place - QUERY : place])
        best = np.argsort(-scores, kind="stable")[:prefetched].tolist()
        right.append(best[0] in cache)
        cache.update(best)
    return right


def milliseconds(right: Sequence[bool], search_ms: float, stride: int) -> float:
    """Time of a text whose documents are guessed `stride` intervals ahead, then checked by one search.

    The first document has to be searched for. Intervals behind a wrong guess are written anew.
    """
    interval_ms = INTERVAL * TOKEN_MS
    place, ms = 1, search_ms + interval_ms
    while place < len(right):
        ahead = min(stride, len(right) - place)
        hits = run_length(right, place, ahead)
        ms += ahead * interval_ms + search_ms
        place += hits
        if hits < ahead:  # this interval's document is now known
            ms += interval_ms
            place += 1
    return ms


def overlapped(right: Sequence[bool], search_ms: float) -> float:
    """Time of a text whose next interval is written behind a guess while the search runs."""
    interval_ms = INTERVAL * TOKEN_MS
    return (
        search_ms
        + interval_ms
        + sum(max(interval_ms, search_ms) if hit else search_ms + interval_ms for hit in right[1:])
    )


def keys(scale: Scale) -> list[Key]:
    """An arm for each number of prefetched documents and each time of a search."""
    return [(prefetched, search_ms) for prefetched in PREFETCHED for search_ms in SEARCHES_MS]


@cache
def all_guesses(target: Path, prefetched: int) -> list[list[bool]]:
    """The guesses of each held-out text."""
    tokenizer = tokenizer_of(target)
    texts = [
        [tokenizer.encode(record[name]).ids for name in ("prompt", "continuation")]
        for record in held_out_records(MOST_HELD_OUT)
    ]
    return [guesses(target, prompt, rest, prefetched) for prompt, rest in texts]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Speed over the plain loop, and the bound if guesses were free and right."""
    prefetched, search_ms = int(key[0]), float(key[1])
    texts = all_guesses(pair.target_path, prefetched)
    queries = sum(map(len, texts))
    plain = queries * (INTERVAL * TOKEN_MS + search_ms)
    speeds = {
        stride: plain / sum(milliseconds(right, search_ms, stride) for right in texts) for stride in STRIDES
    }
    best = max(speeds, key=lambda stride: speeds[stride])
    return {
        "prefetched": prefetched,
        "search_ms": search_ms,
        "queries": queries,
        "hit_rate": round(sum(map(sum, texts)) / queries, 4),
        "best_stride": best,
        "batched": round(speeds[best], 3),
        "overlapped": round(plain / sum(overlapped(right, search_ms) for right in texts), 3),
        "bound": round(1 + search_ms / (INTERVAL * TOKEN_MS), 3),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    few, many = ({row["search_ms"]: row for row in where(rows, prefetched=each)} for each in PREFETCHED)
    best = {at: max(row[how] for row in (few[at], many[at]) for how in WAYS) for at in SEARCHES_MS}
    hits = few[1.0]["hit_rate"]
    slowest = min(row["overlapped"] for row in rows)
    return (
        Judged(f"{hits:.2f} of {rows[0]['queries']} queries", 0.6 <= hits <= 0.9),
        Judged(f"{best[1.0]:.2f} times the plain loop at 1 ms", 0.95 <= best[1.0] <= 1.05),
        Judged(f"{best[10.0]:.2f} at 10 ms", best[10.0] >= 1.05),
        Judged(f"{best[100.0]:.2f} at 100 ms", best[100.0] >= 1.8),
        Judged(f"{many[1.0]['hit_rate']:.2f} with 20 documents of each search", many[1.0]["hit_rate"] >= 0.8),
        Judged(f"{slowest:.2f} times the plain loop at least", slowest >= 0.999),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Speed over the time of a search, a line for each cache and each way to hide searches."""
    curves = [
        line(f"{how}, {prefetched} of each search", where(rows, prefetched=prefetched), "search_ms", how)
        for prefetched in PREFETCHED
        for how in WAYS
    ]
    bounds = tuple(row["bound"] for row in where(rows, prefetched=PREFETCHED[0]))
    curves.append(Curve("searches for nothing", SEARCHES_MS, bounds, True))
    title = f"A query every {INTERVAL} tokens"
    return (Panel(title, "ms of a search", "speed over the plain loop", tuple(curves), is_log_x=True),)


X19 = Experiment(
    name="X19",
    question="When does speculative retrieval pay?",
    predictions=(
        "the cache of one text has the right document for 60 to 90 % of its queries",
        "with searches of 1 ms speculation neither gains nor loses 5 %",
        "with searches of 10 ms it gains 5 % or more, of 18 % that searches cost",
        "with searches of 100 ms it is 1.8 times as fast or more",
        "a cache of the 20 best documents of each search is right for 80 % or more",
        "writing while the search runs is never slower than the plain loop",
    ),
    refuted_by="a cache that is right for fewer than half of the queries: most work ahead would be in vain",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
