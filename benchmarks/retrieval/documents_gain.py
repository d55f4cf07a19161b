"""What documents found by embeddings gain over a session's own text, on held-out files and without services.

Teacher-forced, see teacher_forced.py. In every round the session's own suffix automaton and its near
documents draft. The longest path of either that the target did write is accepted, and one token of the
target's own is committed with it. Every search is waited for, so no draft is late. Run as `python -m
benchmarks.retrieval.documents_gain`; `figures()` is for other benchmarks.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.retrieval.renamed_source import renamed
from benchmarks.retrieval.teacher_forced import (
    DEPTH,
    NODES,
    WrittenPrompt,
    acceptance_length,
    held_out_continuations,
)
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from retrieval_service.trie import CountedTrie


def with_documents(
    written: Sequence[WrittenPrompt], model: Path, documents: Mapping[str, Sequence[int]]
) -> tuple[float, float]:
    """Acceptance length with the nearest of these documents, and how often the first search was right."""
    from retrieval_service.dense.embeddings import TableEmbedder
    from retrieval_service.dense.library import PUBLIC, DocumentLibrary
    from retrieval_service.dense.near_documents import NearDocuments

    library = DocumentLibrary(TableEmbedder.read(model), "one tokenizer")
    library.add(PUBLIC, documents.items())
    near = NearDocuments(library)
    right: list[bool] = []

    def begin(written_prompt: WrittenPrompt) -> Callable[[Sequence[int]], CountedTrie | None]:
        memory = near.follow(written_prompt.name, "", written_prompt.prompt)
        near.is_idle(60)
        right.append(written_prompt.name in memory.documents)

        def draft(ids: Sequence[int]) -> CountedTrie | None:
            near.progress(written_prompt.name, ids)
            near.is_idle(60)
            return memory.lookup(ids, node_limit=NODES, depth=DEPTH)

        return draft

    try:
        return acceptance_length(written, begin), sum(right) / len(right)
    finally:
        near.close()


def documents_by_arm(tokenizer: Tokenizer, distractors: int) -> dict[str, dict[str, list[int]]]:
    """Documents of each arm: the held-out files verbatim, renamed or absent, beside other files."""
    from training.corpus import encode, split, stdlib, training_files

    files = stdlib()
    held = split(files)[1]
    others = training_files(tokenizer, files, ())[0]
    names = sorted(others)
    kept = {name: others[name] for name in names[:: max(1, len(names) // max(1, distractors))][:distractors]}
    copies = {name: renamed(text) for name, text in held.items()}
    return {
        "verbatim": encode(tokenizer, held) | kept,
        "renamed": encode(tokenizer, copies) | kept,
        "absent": kept,
    }


def figures(model: Path, *, prompts: int = 24, tokens: int = 200, distractors: int = 200) -> dict[str, Any]:
    """Acceptance lengths of the model's greedy continuations and, as `of_text`, of the files' own text.

    `of_text` holds for a target that goes on exactly as the file does, not for this model.
    """
    tokenizer = tokenizer_of(model)
    greedy = held_out_continuations(model, prompts, tokens)
    texts = [
        tuple(tokenizer.encode(record["continuation"]).ids[:tokens]) for record in held_out_records(prompts)
    ]
    of_text = [replace(each, continuation=text) for each, text in zip(greedy, texts, strict=True)]
    documents = documents_by_arm(tokenizer, distractors)
    fields: dict[str, Any] = {"documents": len(documents["verbatim"])}
    for kind, written in (("greedy", greedy), ("of_text", of_text)):
        by = {"session_only": acceptance_length(written, lambda _: lambda _: None)}
        for arm in documents:
            by[f"dense_{arm}"], fields[f"found_{arm}"] = with_documents(written, model, documents[arm])
        fields[f"acceptance_length_{kind}"] = {arm: round(value, 3) for arm, value in by.items()}
    return fields


def index_kinds(sizes: Sequence[int], dimensions: int = 256) -> list[dict[str, Any]]:
    """Build time, MB on disk, search time and recall of each kind of index over clusters of 50 vectors.

    Both recalls are of the 5 nearest vectors: `recall` among the first 5 that the index returns,
    `recall_ranked` among the first 5 of its 64 once they are ranked by exact distance.
    """
    from retrieval_service.dense.embeddings import unit
    from retrieval_service.dense.index import VectorIndex

    rows = []
    for count in sizes:
        drawn = np.random.default_rng(0)
        centres = drawn.standard_normal((count // 50, dimensions), dtype=np.float32)
        vectors = centres[drawn.integers(0, len(centres), count)]
        vectors = unit(vectors + 0.6 * drawn.standard_normal((count, dimensions), dtype=np.float32))
        chosen = drawn.integers(0, count, 200)
        queries = unit(vectors[chosen] + 0.03 * drawn.standard_normal((200, dimensions), dtype=np.float32))
        nearest = [set(np.argpartition(-(vectors @ query), 5)[:5].tolist()) for query in queries]
        for kind in ("flat", "hnsw", "ivfpq"):
            rows.append(
                {"vectors": count, "kind": kind} | _index_row(VectorIndex, kind, vectors, queries, nearest)
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _index_row(
    index: Any, kind: str, vectors: np.ndarray, queries: np.ndarray, nearest: Sequence[set[int]]
) -> dict[str, Any]:
    import tempfile

    started = time.perf_counter()
    built = index.build(vectors, kind)
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        built.write(Path(folder) / "index")
        size = (Path(folder) / "index").stat().st_size
    taken, first, ranked = [], 0, 0
    for query, five in zip(queries, nearest, strict=True):
        began = time.perf_counter()
        found = [row for row, _ in built.search(query, 64)]
        taken.append(time.perf_counter() - began)
        first += len(five & set(found[:5]))
        ranked += len(five & set(sorted(found, key=lambda row: -float(vectors[row] @ query))[:5]))
    return {
        "build_seconds": round(seconds, 2),
        "mb": round(size / 2**20, 1),
        "search_ms": {"p50": round(float(np.quantile(taken, 0.5)) * 1e3, 3)},
        "recall": round(first / 5 / len(queries), 3),
        "recall_ranked": round(ranked / 5 / len(queries), 3),
    }


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODELS / "target", help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=24, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt")
    parser.add_argument("--distractors", type=int, default=200, help="documents beside the right one")
    parser.add_argument(
        "--index-sizes", type=int, nargs="*", default=[], help="also time indexes of these numbers of vectors"
    )
    settings = parser.parse_args()
    started = time.perf_counter()
    fields = figures(
        settings.model,
        prompts=settings.prompts,
        tokens=settings.tokens,
        distractors=settings.distractors,
    )
    if settings.index_sizes:
        fields["index_kinds"] = index_kinds(settings.index_sizes)
    shown = {"model": settings.model.name, "prompts": settings.prompts, "tokens": settings.tokens}
    print(
        json.dumps(
            {
                "settings": shown | {"nodes": NODES, "depth": DEPTH},
                "seconds": round(time.perf_counter() - started, 1),
            }
            | fields,
            default=str,
        )
    )


if __name__ == "__main__":
    main()
