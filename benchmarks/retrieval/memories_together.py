"""What the retrieval worker's memories gain together: accepted tokens at equal nodes, without services.

The target's continuations are decoded first, so drafts never change them. Then each text is replayed round by
round: the real worker and the verifier's own lookup draft, the verifier's pool calibrates and merges, and the
best nodes are verified against the text. Sets of texts: held-out files; requests of one template, whose
earlier outputs are remembered; and the files' own text beside renamed copies of the files. Run `python -m
benchmarks.retrieval.memories_together`. The last line is one JSON object.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.retrieval.acceptance import requests
from benchmarks.retrieval.documents_gain import documents_by_arm
from benchmarks.retrieval.teacher_forced import accepted, continuations
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.heldout import HELD_OUT, held_out_records, tokenizer_of
from outrider.cli.local.demo_corpus import demo_corpus
from outrider.source.events import DecodingRequest, Follow, Outgoing, Progress, SessionEnded
from outrider.source.followed import SourceProfile
from outrider.tokens import TokenTable
from outrider.wire.codec import SessionKey
from retrieval_service.catalogue import NAMES, Catalogue, CorpusKey
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.library import PUBLIC, DocumentLibrary
from retrieval_service.dense.near_documents import NearDocuments
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.ranking import DraftShape
from retrieval_service.worker import RetrievalWorker
from speculative.calibration import SessionCalibrator
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from verifier_service.engine.source_policy import Reputations
from verifier_service.proposers import ProposerInit, make_proposer

HELD_OUT_SET, TEMPLATE, COPIED = SETS = ("held_out", "template", "copied")
LOOKUP = "lookup"
SEARCH_S = 60.0


class Recorded(NamedTuple):
    """A prompt and the text that follows it."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    seed: int


@dataclass
class RoundCounts:
    """Counts over all rounds of one set."""

    tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    drafted: int = 0
    promised: float = 0.0
    accepted_by: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """What can be compared between runs of different length."""
        accepted_tokens = self.tokens - self.rounds
        return {
            "acceptance_length": round(self.tokens / self.rounds, 3),
            "nodes_per_round": round(self.nodes / self.rounds, 2),
            "accepted_per_node": round(accepted_tokens / max(1, self.nodes), 4),
            "promised_per_accepted": round(self.promised / max(1, accepted_tokens), 3),
            "sent_per_token": round(self.drafted / self.tokens, 2),
            "accepted_by": dict(sorted(self.accepted_by.items())),
        }


class Rounds:
    """Replays texts against one worker, as a verifier of `node_limit` nodes a round would ask it.

    Args:
        names: memories that draft, beside the verifier's own lookup.
    """

    def __init__(
        self, catalogue: Catalogue, names: Sequence[str], params: SamplingParams, width: int, node_limit: int
    ) -> None:
        self._names, self._params, self._width, self._limit = tuple(names), params, width, node_limit
        self._near = catalogue.near
        self._sent: list[dict[int, Outgoing]] = []
        profile = SourceProfile("retrieval", "retrieval", names=catalogue.names, noun="service")
        self._worker = RetrievalWorker(
            catalogue, profile, self._sent.append, lambda name, seconds: None, shape=DraftShape()
        )
        self._reputations = Reputations()
        self.counts = RoundCounts()

    def replay(self, number: int, recorded: Recorded) -> None:
        """Replays one text."""
        ids, limit = list(recorded.prompt), len(recorded.prompt) + len(recorded.text)
        every = (LOOKUP, *self._names)
        priors = [self._reputations.of(name, self._params).calibration for name in every]
        pool = DraftPool(
            ids,
            epoch=1,
            vocabulary_size=self._width,
            limit=limit + 1,
            calibrator=SessionCalibrator(priors),
        )
        lookup = make_proposer(LOOKUP, ProposerInit(len(ids), (), (), None))
        lookup.append(ids)
        self._worker.submit(self._follow(number, recorded, limit + 1))
        left = recorded.text
        while left:
            self._offer(pool, lookup.propose(self._limit), len(ids))
            tree = pool.best_tree(self._limit)
            # The last token of a round is the target's own.
            right = accepted(tree, left[:-1])
            committed = left[: right + 1]
            self._count(tree, committed, every)
            pool.commit(committed)
            lookup.append(committed)
            start = len(ids)
            ids += committed
            left = left[len(committed) :]
            self._worker.submit(Progress(0, number, start, committed, prefix_hash(ids)))
        self._worker.submit(SessionEnded(0, number))
        self._worker.take_in(wait=False)

    def _offer(self, pool: DraftPool, copied: Any, base: int) -> None:
        if copied is not None:
            pool.offer(
                Fragment(1, 1, base, pool.hash_at(base), copied.tokens, copied.parents, copied.survival)
            )
        self._worker.take_in(wait=False)
        if self._near is not None:
            self._near.is_idle(SEARCH_S)  # type: ignore[attr-defined]
        self._sent.clear()
        self._worker.work()
        for message in self._sent:
            for _, fragment in message[0].drafts:
                self.counts.drafted += len(fragment)
                pool.offer(
                    Fragment(
                        fragment.source + 1,
                        1,
                        fragment.base,
                        fragment.prefix_hash,
                        fragment.tokens,
                        fragment.parents,
                        fragment.survival,
                    )
                )

    def _count(self, tree: Any, committed: Sequence[int], every: Sequence[str]) -> None:
        counts = self.counts
        counts.tokens += len(committed)
        counts.rounds += 1
        counts.nodes += len(tree)
        counts.promised += sum(tree.survival)
        node = -1
        for token in committed[:-1]:
            node = tree.children(node)[token]
            counts.accepted_by[every[tree.sources[node] - 1]] += 1

    def _follow(self, number: int, recorded: Recorded, limit: int) -> Follow:
        request = DecodingRequest(
            epoch=1,
            ids=recorded.prompt,
            prompt_length=len(recorded.prompt),
            limit=limit,
            params=self._params,
            seed=recorded.seed,
            node_limit=255,
            vocabulary_size=self._width,
            sources=self._names,
            learn=True,
        )
        return Follow(0, number, SessionKey("tenant", f"session {number}"), request)


def recorded_sets(settings: argparse.Namespace, temperature: float) -> dict[str, list[Recorded]]:
    """The texts of each set, by name."""
    tokenizer = tokenizer_of(settings.target)
    records = held_out_records(settings.prompts)
    held = [tuple(tokenizer.encode(record["prompt"]).ids) for record in records]
    template = [tuple(tokenizer.encode(text).ids) for text in requests(settings.requests)]
    own = [tuple(tokenizer.encode(record["continuation"]).ids[: settings.tokens]) for record in records]
    written = continuations(settings.target, [*held, *template], settings.tokens, temperature)
    pairs = {
        HELD_OUT_SET: zip(held, written, strict=False),
        TEMPLATE: zip(template, written[len(held) :], strict=True),
        COPIED: zip(held, own, strict=True),
    }
    starts = {HELD_OUT_SET: 0, TEMPLATE: len(held), COPIED: 0}
    return {
        name: [Recorded(*pair, starts[name] + number) for number, pair in enumerate(pairs[name])]
        for name in settings.sets
        if name != COPIED or not temperature  # noise chose nothing in the files
    }


def read_sets(settings: argparse.Namespace) -> dict[float, dict[str, list[Recorded]]]:
    """The texts of every temperature, from a file of an earlier run if there is one."""
    path = settings.recorded
    if path is not None and path.exists():
        known = json.loads(path.read_text())
        return {
            float(temperature): {
                name: [Recorded(tuple(prompt), tuple(text), seed) for prompt, text, seed in rows]
                for name, rows in sets.items()
                if name in settings.sets
            }
            for temperature, sets in known.items()
        }
    found = {temperature: recorded_sets(settings, temperature) for temperature in settings.temperatures}
    if path is not None:
        path.write_text(json.dumps(found))
    return found


def measure(
    settings: argparse.Namespace,
    sets: Mapping[str, Sequence[Recorded]],
    library: DocumentLibrary,
    corpus: CorpusIndex,
    temperature: float,
) -> dict[str, Any]:
    """Figures by set and node limit."""
    params, width = SamplingParams(temperature=temperature), tokenizer_of(settings.target).get_vocab_size()
    found: dict[str, Any] = {}
    for name in sets:
        for nodes in settings.nodes:
            near, past = NearDocuments(library), PastOutputs(None)
            catalogue = Catalogue(past, near)
            catalogue.add(CorpusKey(None, "demo"), corpus)
            try:
                rounds = Rounds(catalogue, settings.memories, params, width, nodes)
                for number, recorded in enumerate(sets[name]):
                    rounds.replay(number, recorded)
            finally:
                near.close()
                past.close()
            row = rounds.counts.figures()
            found.setdefault(name, {})[str(nodes)] = row
            if not settings.json:
                print(f"{name}, temperature {temperature:g}, {nodes} nodes: {row}", flush=True)
    return found


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--requests", type=int, default=48, help="requests of the template")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text")
    parser.add_argument("--distractors", type=int, default=200, help="documents beside the renamed copies")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of texts")
    parser.add_argument(
        "--memories", nargs="+", choices=NAMES, default=list(NAMES), help="memories that draft"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="one or more")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16], help="nodes per round")
    parser.add_argument("--recorded", type=Path, help="file that keeps the texts for further runs")
    return parser.parse_args()


def main() -> None:
    """Replays all sets and prints the result."""
    settings, started = parse(), time.perf_counter()
    tokenizer = tokenizer_of(settings.target)
    texts = read_sets(settings)
    library = DocumentLibrary(TableEmbedder.read(settings.target), "one tokenizer")
    library.add(PUBLIC, documents_by_arm(tokenizer, settings.distractors)["renamed"].items())
    tokens = TokenTable.from_json(tokenizer.to_str())
    corpus = CorpusIndex.open(demo_corpus(tokens, HELD_OUT), tokens.digest)
    found = {
        f"{temperature:g}": measure(settings, texts[temperature], library, corpus, temperature)
        for temperature in settings.temperatures
    }
    shown = {name: getattr(settings, name) for name in ("prompts", "requests", "tokens", "memories")}
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"settings": shown, "seconds": seconds, "by_temperature": found}))


if __name__ == "__main__":
    main()
