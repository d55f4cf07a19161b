"""What references found by embeddings gain over a session's own text, on held-out files, offline.

Teacher-forced: the target's greedy continuations are made first, by the packed pass in a process of its own
(torch and FAISS never share one); then each is gone through round by round. At every position the session's
own suffix automaton and its references draft; the longest path of either that the target did write is
accepted, and one token of the target's own is committed with it. Searches are waited for, so these figures
know no lateness. Run as `python benchmarks/retrieval_dense.py`; `figures()` is for other benchmarks.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from envelope import REPOSITORY
from retrieval_renamed import renamed
from tokenizers import Tokenizer

from retrieval_service.trie import CountedTrie, counted
from speculative.lookup.suffix_automaton import SuffixAutomaton

if TYPE_CHECKING:
    from outrider.lm.packed import PackedLM

TOGETHER = 32
"""Continuations that are computed in one batch."""
SESSION_DRAFT = 10
NODES = 16
DEPTH = 10


@dataclass(frozen=True)
class Written:
    """A held-out prompt's ids, and what the target wrote after it."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def continuations(model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
    """The target's greedy continuations, all prompts in one batch, computed by a process of its own."""
    command = [sys.executable, __file__, "--continue", "--model", str(model), "--tokens", str(tokens)]
    asked = json.dumps([list(prompt) for prompt in prompts])
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    if ended.returncode:
        raise RuntimeError(f"the target's process failed: {ended.stderr[-2000:]}")
    return [tuple(ids) for ids in json.loads(ended.stdout.splitlines()[-1])]


def write_continuations(model: Path, tokens: int) -> None:
    """That process: prompts from stdin, continuations to stdout; each ends with the first end id."""
    from outrider.lm.packed import PackedLM

    lm = PackedLM.load(model)
    prompts = json.load(sys.stdin)
    written: list[list[int]] = []
    for first in range(0, len(prompts), TOGETHER):
        written += _continued(lm, prompts[first : first + TOGETHER], tokens)
    print(json.dumps(written))


def _continued(lm: "PackedLM", prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Some prompts' continuations, in one batch."""
    from outrider.lm.plan import Share

    written: list[list[int]] = []
    tables = []
    for prompt in prompts:
        table = lm.table(reserve=len(prompt) + tokens)
        logits = lm.forward([Share(table, prompt, range(-1, len(prompt) - 1), [len(prompt) - 1])])
        table.commit(list(range(len(prompt))))
        tables.append(table)
        written.append([int(logits[0].argmax())])
    for _ in range(tokens - 1):
        going = [n for n, ids in enumerate(written) if ids[-1] not in lm.eos_ids]
        if not going:
            break
        logits = lm.forward([Share(tables[n], [written[n][-1]], [-1], [0]) for n in going])
        for row, n in enumerate(going):
            tables[n].commit([0])
            written[n].append(int(logits[row].argmax()))
    for table in tables:
        lm.release(table)
    return written


def accepted(trie: CountedTrie | None, following: Sequence[int]) -> int:
    """How many of the tokens that follow are a path of the trie from its root."""
    if trie is None:
        return 0
    children = {
        (parent, token): n for n, (parent, token) in enumerate(zip(trie.parents, trie.tokens, strict=True))
    }
    node = -1
    for count, token in enumerate(following):
        if (node, token) not in children:
            return count
        node = children[node, token]
    return len(following)


def acceptance_length(
    written: Sequence[Written], begin: Callable[[Written], Callable[[Sequence[int]], CountedTrie | None]]
) -> float:
    """Tokens per round. `begin` starts a session's drafter: from ids so far to a trie."""
    tokens = rounds = 0
    for one in written:
        draft = begin(one)
        ids = list(one.prompt)
        own = SuffixAutomaton(ids)
        rest = one.continuation
        while rest:
            copied = own.draft(SESSION_DRAFT)
            chain = counted([copied.tokens], max(1, copied.match_length), SESSION_DRAFT)
            # The last token is the target's own: a round commits one more than it accepts.
            most = max(accepted(chain, rest[:-1]), accepted(draft(ids), rest[:-1]))
            for token in rest[: most + 1]:
                ids.append(token)
                own.append(token)
            tokens, rounds, rest = tokens + most + 1, rounds + 1, rest[most + 1 :]
    return tokens / rounds


def with_references(
    written: Sequence[Written], model: Path, documents: Mapping[str, Sequence[int]]
) -> tuple[float, float]:
    """Acceptance length with references from these documents; how often the right one was found at first."""
    from retrieval_service.dense.embeddings import TableEmbedder
    from retrieval_service.dense.library import PUBLIC, DocumentLibrary
    from retrieval_service.dense.references import References

    library = DocumentLibrary(TableEmbedder.read(model), "one tokenizer")
    library.add(PUBLIC, documents.items())
    references = References(library)
    right: list[bool] = []

    def begin(one: Written) -> Callable[[Sequence[int]], CountedTrie | None]:
        memory = references.follow(one.name, "", one.prompt)
        references.is_idle(60)
        right.append(one.name in memory.documents)

        def draft(ids: Sequence[int]) -> CountedTrie | None:
            references.progress(one.name, ids)
            references.is_idle(60)
            return memory.lookup(ids, node_limit=NODES, depth=DEPTH)

        return draft

    try:
        return acceptance_length(written, begin), sum(right) / len(right)
    finally:
        references.close()


def held_out(tokenizer: Tokenizer, distractors: int) -> dict[str, dict[str, list[int]]]:
    """Documents of each arm: held-out files verbatim, renamed or not at all, beside other files."""
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
    """Acceptance lengths of the model's greedy continuations, and, as `of_text`, of the files' own.

    The second kind is what a target would get that writes on exactly as the file does; it is none of the
    model's figures.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = (REPOSITORY / "models" / "heldout.jsonl").read_text().splitlines()[:prompts]
    held = [json.loads(line) for line in lines]
    ids = [tuple(tokenizer.encode(one["prompt"]).ids) for one in held]
    greedy = continuations(model, ids, tokens)
    texts = [tuple(tokenizer.encode(one["continuation"]).ids[:tokens]) for one in held]
    documents = held_out(tokenizer, distractors)
    told: dict[str, Any] = {"documents": len(documents["verbatim"])}
    for kind, outputs in (("greedy", greedy), ("of_text", texts)):
        written = [
            Written(one["name"], prompt, output)
            for one, prompt, output in zip(held, ids, outputs, strict=True)
        ]
        by = {"session_only": acceptance_length(written, lambda _: lambda _: None)}
        for arm in documents:
            by[f"dense_{arm}"], told[f"found_{arm}"] = with_references(written, model, documents[arm])
        told[f"acceptance_length_{kind}"] = {arm: round(value, 3) for arm, value in by.items()}
    return told


def index_kinds(sizes: Sequence[int], dimensions: int = 256) -> list[dict[str, Any]]:
    """Each kind of index over synthetic clusters of 50: time to build, MB on disk, search time, recall.

    Of the nearest 5: `recall` is of what the index returns first, `recall_ranked` of the 64 it returns when
    they are ranked anew.
    """
    from retrieval_service.dense.embeddings import unit
    from retrieval_service.dense.index import VectorIndex

    rows = []
    for count in sizes:
        drawn = np.random.default_rng(0)
        centres = drawn.standard_normal((count // 50, dimensions), dtype=np.float32)
        vectors = centres[drawn.integers(0, len(centres), count)]
        vectors = unit(vectors + 0.6 * drawn.standard_normal((count, dimensions), dtype=np.float32))
        asked = drawn.integers(0, count, 200)
        queries = unit(vectors[asked] + 0.03 * drawn.standard_normal((200, dimensions), dtype=np.float32))
        nearest = [set(np.argpartition(-(vectors @ query), 5)[:5].tolist()) for query in queries]
        for kind in ("flat", "hnsw", "ivfpq"):
            rows.append(
                {"vectors": count, "kind": kind} | _measured(VectorIndex, kind, vectors, queries, nearest)
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _measured(
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
    """Read the flags, run, print the envelope."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "target")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--distractors", type=int, default=200)
    parser.add_argument("--index-sizes", type=int, nargs="*", default=[], help="also time indexes of so many")
    parser.add_argument("--continue", dest="target", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.target:
        write_continuations(settings.model, settings.tokens)
        return
    started = time.perf_counter()
    told = figures(
        settings.model,
        prompts=settings.prompts,
        tokens=settings.tokens,
        distractors=settings.distractors,
    )
    if settings.index_sizes:
        told["index_kinds"] = index_kinds(settings.index_sizes)
    shown = {"model": settings.model.name, "prompts": settings.prompts, "tokens": settings.tokens}
    print(
        json.dumps(
            {
                "settings": shown | {"nodes": NODES, "depth": DEPTH},
                "seconds": round(time.perf_counter() - started, 1),
            }
            | told,
            default=str,
        )
    )


if __name__ == "__main__":
    main()
