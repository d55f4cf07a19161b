"""Measures iterative retrieval-augmented generation: the plain loop beside strides of guessed retrievals.

Run as `outrider bench rag --json`. docs/figures/rag.md says what each field means.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, alternating_orders, paired_ratio
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from benchmarks.shared.services import UpServices
from outrider.client import Client
from outrider.rag import DenseRetriever, Rag, RagAnswer, RagLimits, RagPassage, SparseRetriever, hashed_words
from outrider.rag.passages import Retriever
from training.corpus import stdlib, training_files

PLAIN = "plain"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "stride 1": {"guesses": 1},
    "stride 3": {"guesses": 3},
    "stride 3, prefetch": {"guesses": 3, "prefetch": 20},
    "adaptive, prefetch": {"guesses": "adaptive", "prefetch": 20},
}
"""Limits of each way to search."""


class SlowRetriever:
    """A retriever whose searches take longer by some seconds, as those of a large or remote index do."""

    def __init__(self, retriever: Retriever, delay_s: float) -> None:
        self._retriever = retriever
        self._delay_s = delay_s

    def search(self, queries: Sequence[str], count: int) -> list[list[RagPassage]]:
        """Searches, after the delay; one delay for the whole batch."""
        time.sleep(self._delay_s)
        return self._retriever.search(queries, count)

    def scores(self, query: str, passages: Sequence[RagPassage]) -> list[float]:
        """The scores of the retriever that is slowed."""
        return self._retriever.scores(query, passages)


def passages_of(tokenizer: Tokenizer, count: int, size: int) -> list[RagPassage]:
    """`count` pieces of `size` tokens, of files that are no held-out ones, spread over the library."""
    files = training_files(tokenizer, stdlib(), ())[0]
    pieces = [
        RagPassage(f"{name}:{start}", tokenizer.decode(ids[start : start + size]))
        for name, ids in sorted(files.items())
        for start in range(0, len(ids), size)
    ]
    return pieces[:: max(1, len(pieces) // count)][:count]


def figures(answers: dict[str, list[RagAnswer]], runs: Sequence[TimedRun]) -> dict[str, Any]:
    """The figures of each arm."""
    return {arm: _arm(arm, answers, runs) for arm in answers}


def _arm(arm: str, answers: dict[str, list[RagAnswer]], runs: Sequence[TimedRun]) -> dict[str, Any]:
    own = answers[arm]
    tokens = sum(len(answer.ids) for answer in own)
    counts = [answer.counts for answer in own]
    right, wrong = sum(count.right for count in counts), sum(count.wrong for count in counts)
    fields: dict[str, Any] = {
        "ms_per_token": round(1000 * sum(run.seconds for run in runs if run.arm == arm) / tokens, 3),
        "search_ms": round(1000 * sum(count.search_s for count in counts) / len(own), 1),
        "request_ms": round(1000 * sum(count.piece_s for count in counts) / len(own), 1),
        "searches": round(fmean(count.searches for count in counts), 2),
        "requests": round(fmean(count.pieces for count in counts), 2),
        "discarded_share": round(sum(count.discarded for count in counts) / tokens, 4),
    }
    if arm != PLAIN:
        fields["accuracy"] = round(right / max(1, right + wrong), 4)
        fields["over_plain"] = paired_ratio(runs, arm, PLAIN)
        fields["identical"] = all(
            (answer.ids, answer.passages) == (plain.ids, plain.passages)
            for answer, plain in zip(own, answers[PLAIN], strict=True)
        )
    return fields


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Starts the services and measures every search time."""
    tokenizer = tokenizer_of(settings.target)
    passages = passages_of(tokenizer, settings.passages, settings.passage_tokens)
    dense = settings.retriever == "dense"
    retriever: Retriever = DenseRetriever(passages, hashed_words()) if dense else SparseRetriever(passages)
    # Only the end of each prompt: passage, prompt and text share a context of 2,048 tokens.
    prompts = [
        tokenizer.decode(tokenizer.encode(record["prompt"]).ids[-settings.prompt_tokens :])
        for record in held_out_records(settings.prompts)
    ]
    by_delay = {}
    with UpServices(settings.target, settings.drafter) as up, Client(up.address) as client:
        for delay_ms in map(float, settings.search_ms.split(",")):
            slow = SlowRetriever(retriever, delay_ms / 1000)
            by_delay[f"{delay_ms:g}"] = _measure_delay(settings, client, slow, tokenizer, prompts)
    rows = [row for arms in by_delay.values() for row in arms.values()]
    return {"identical": all(row.get("identical", True) for row in rows), "by_search_ms": by_delay}


def _measure_delay(
    settings: argparse.Namespace,
    client: Client,
    retriever: Retriever,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
) -> dict[str, Any]:
    answers: dict[str, list[RagAnswer]] = {arm: [] for arm in ARMS}
    runs: list[TimedRun] = []
    orders = alternating_orders(ARMS)
    for number in range(settings.repeats):
        for at, prompt in enumerate(prompts):
            for arm in next(orders):
                limits = RagLimits(every=settings.every, passage_tokens=settings.passage_tokens, **ARMS[arm])
                rag = Rag(client, retriever, tokenizer, limits)
                began = time.perf_counter()
                answer = rag.generate(
                    prompt,
                    max_tokens=settings.tokens,
                    temperature=settings.temperature,
                    seed=1000 + at,
                    # Tenants share nothing, so no answer finds another one's keys and values.
                    tenant=f"{arm} {number} {at}",
                    ignore_eos=True,
                    speculative=arm != PLAIN,
                    timeout=120,
                )
                seconds = time.perf_counter() - began
                answers[arm].append(answer)
                runs.append(TimedRun(arm, at, number, answer.ids, seconds, answer.counts.pieces))
    return figures(answers, runs)


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("rag", __doc__)
    add_pair(parser)
    parser.add_argument("--retriever", default="dense", choices=("dense", "sparse"))
    parser.add_argument("--passages", type=int, default=500, help="number of passages")
    parser.add_argument("--passage-tokens", type=int, default=128, help="tokens of each passage")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--search-ms", default="0,10,100", help="ms by which each search is slowed")
    parser.add_argument("--every", type=int, default=8, help="tokens between two searches")
    parser.add_argument("--prompts", type=int, default=4, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2, help="repeats of every run")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    print_result("rag", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
