"""What contexts near in the target's hidden states would add to the longest suffix, and at what price.

A source hears the hidden state that chose the last committed token, and the token. It could search a text for
the state that is nearest to this one, among the places where the same token follows, and copy what follows
there (DReSD, Gritta et al., 2025). Here this is compared, on the target's greedy continuations of held-out
prompts, with what the worker copies today: behind the longest suffix that the same text or the session holds.
The search is exact, so it finds at least as much as any index. Run `python -m
benchmarks.retrieval.nearest_contexts`. The last line is one JSON object.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.retrieval.teacher_forced import WrittenPrompt, held_out_continuations
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from outrider.lm.features import LAST
from retrieval_service.dense.matching import DocumentText
from speculative.lookup.suffix_automaton import SuffixAutomaton
from training import corpus
from training.heads.frozen import FrozenTarget
from training.heads.lessons import features_of

WINDOW = 512
CHAIN = 10
"""Most tokens that are copied."""
SHORT = 3
"""Suffixes shorter than this count as no match."""
QUERIES = 128
"""Queries that are compared with the text at a time."""


class Place(NamedTuple):
    """A position behind which something is drafted: the state that chose its last token, and the future."""

    state: np.ndarray
    known: int
    future: tuple[int, ...]
    match: int
    """Length of the longest suffix that the text or the session held."""
    copied: tuple[int, ...]
    """What followed that suffix."""


class States:
    """The text's hidden states, one for each place that two tokens follow, and those tokens.

    Args:
        rows: token ids, [rows, WINDOW].
        features: the target's features of these rows, [rows, WINDOW, width].
        dimensions: of the projected states; 0: all, not projected.
    """

    def __init__(self, rows: np.ndarray, features: Sequence[np.ndarray], dimensions: int) -> None:
        states = np.concatenate([part[:, :-2] for part in features]).astype(np.float32)
        flat = states.reshape(-1, states.shape[-1])
        self._mean, self._scale = flat.mean(axis=0), flat.std(axis=0) + 1e-6
        self._axes = np.eye(flat.shape[1], dtype=np.float32)
        if dimensions:
            sample = (flat[:: max(1, len(flat) // 20_000)] - self._mean) / self._scale
            self._axes = np.linalg.svd(sample, full_matrices=False)[2][:dimensions].T
        self._rows = rows
        self._states = torch.from_numpy(self.projected(flat))
        self._next = torch.from_numpy(rows[:, 1:-1].reshape(-1).astype(np.int64))

    def projected(self, states: np.ndarray) -> np.ndarray:
        """Unit vectors of these states."""
        found = ((states.astype(np.float32) - self._mean) / self._scale) @ self._axes
        unit: np.ndarray = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def copied(self, places: Sequence[Place]) -> tuple[list[tuple[int, ...]], float]:
        """What follows the nearest state of each place where the known token follows; ms of a search."""
        found: list[tuple[int, ...]] = []
        spent = 0.0
        for first in range(0, len(places), QUERIES):
            part = places[first : first + QUERIES]
            queries = torch.from_numpy(self.projected(np.stack([place.state for place in part])))
            known = torch.tensor([place.known for place in part])
            began = time.perf_counter()
            cosines = queries @ self._states.T
            spent += time.perf_counter() - began
            cosines[self._next[None, :] != known[:, None]] = -2.0
            best = cosines.max(dim=1)
            for cosine, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, column = divmod(index, WINDOW - 2)
                start = column + 2
                after = self._rows[row, start : start + CHAIN] if cosine > -2.0 else self._rows[0, :0]
                found.append(tuple(int(token) for token in after))
        return found, 1000 * spent / max(1, len(places))


def agreed(copied: Sequence[int], future: Sequence[int]) -> int:
    """How many of the copied tokens are right, from the first on."""
    pairs = list(zip(copied, future, strict=False))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), len(pairs))


def places_of(target: FrozenTarget, text: DocumentText, written: Sequence[WrittenPrompt]) -> list[Place]:
    """Every position of the continuations behind which a token follows."""
    found = []
    for each in written:
        ids = [*each.prompt, *each.continuation]
        states = target.features(torch.tensor([ids]))[0].float().numpy()
        own = SuffixAutomaton(each.prompt)
        for at in range(len(each.prompt), len(ids) - 1):
            own.append(ids[at])
            match, copied = _suffix(text, own, ids[: at + 1])
            found.append(Place(states[at - 1], ids[at], tuple(ids[at + 1 : at + 1 + CHAIN]), match, copied))
    return found


def _suffix(text: DocumentText, own: SuffixAutomaton, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    trie = text.lookup(ids, node_limit=CHAIN, depth=CHAIN)
    if trie is None or trie.match_length <= own.match_length:
        return own.match_length, own.draft(CHAIN).tokens
    chain: list[int] = []
    node = -1
    for index, parent in enumerate(trie.parents):  # the likeliest child of a node comes first
        if parent == node:
            chain.append(trie.tokens[index])
            node = index
    return trie.match_length, tuple(chain)


def figures(places: Sequence[Place], near: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How often the first copied token is right, and how many are, by whether a suffix matched."""
    rows = {}
    groups = {"all": places, "no_match": [p for p in places if p.match < SHORT]}
    groups["match"] = [p for p in places if p.match >= SHORT]
    nearest = {id(place): tokens for place, tokens in zip(places, near, strict=True)}
    for name, group in groups.items():
        suffix = [agreed(place.copied, place.future) for place in group]
        states = [agreed(nearest[id(place)], place.future) for place in group]
        both = [max(pair) for pair in zip(suffix, states, strict=True)]
        rows[name] = {"places": len(group)} | {
            way: {
                "first_right": round(sum(count > 0 for count in counts) / max(1, len(group)), 4),
                "tokens_right": round(sum(counts) / max(1, len(group)), 4),
            }
            for way, counts in (("suffix", suffix), ("states", states), ("either", both))
        }
    return rows


def measure(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures for each number of dimensions."""
    tokenizer = tokenizer_of(settings.target)
    held = [record["prompt"] + record["continuation"] for record in held_out_records(settings.prompts)]
    train, _ = corpus.training_files(tokenizer, corpus.stdlib(), held)
    ids = np.concatenate([np.array(file, dtype=np.uint32) for file in train.values()])
    rows = ids[: settings.tokens // WINDOW * WINDOW].reshape(-1, WINDOW)
    target = FrozenTarget.load(str(settings.target), "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    features, _ = features_of(target, rows, (LAST,), folder, lambda done, total: None)
    text = DocumentText([row.astype(np.int32) for row in rows])
    places = places_of(
        target, text, held_out_continuations(settings.target, settings.prompts, settings.length)
    )
    width = features[0].shape[-1]
    found: dict[str, Any] = {}
    for dimensions in settings.dimensions:
        near, ms = States(rows, features, dimensions).copied(places)
        used = dimensions or width
        found[str(used)] = {
            "bytes_per_committed_token": 2 * used,
            "bytes_per_text_token": 2 * used,
            "search_ms": round(ms, 3),
        } | figures(places, near)
    return {"text_tokens": int(rows.size), "by_dimensions": found}


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--length", type=int, default=96, help="tokens of a continuation")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the text that is searched")
    parser.add_argument(
        "--dimensions", type=int, nargs="+", default=[0, 64], help="of a state; 0: as the target has it"
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the text's hidden states for other runs")
    settings = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        fields = measure(settings, settings.work or Path(scratch))
    shown = {name: getattr(settings, name) for name in ("prompts", "length", "tokens")}
    print(json.dumps({"settings": shown, "seconds": round(time.perf_counter() - started, 1)} | fields))


if __name__ == "__main__":
    main()
