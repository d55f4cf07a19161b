"""How long a drafter that learns is held up by new weights, and how soon followed sessions have drafts again.

A real worker with the real drafter follows sessions and drafts all that it may. Then the same weights, loaded
a second time, take the place of the serving ones, over and over. docs/figures/swaps.md says what each field
means.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.shared.cache_dir import cache_for
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from drafter_service.drafters import Drafter, load
from drafter_service.settings import DrafterSettings
from drafter_service.worker import DrafterWorker
from outrider.source.events import DecodingRequest, Follow, Outgoing
from outrider.source.followed import SourceProfile
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams

_STREAM = 0


class SwappedWorker:
    """A worker that follows sessions, and notes when each of them was first sent a draft.

    Args:
        settings: of the drafter.
        drafters: the serving drafter, and one that can take its place.
        texts: committed tokens of each session.
    """

    def __init__(
        self, settings: DrafterSettings, drafters: Sequence[Drafter], texts: Sequence[tuple[int, ...]]
    ) -> None:
        first, self._next = drafters
        self._drafted_s: dict[int, float] = {}
        """When each session was first sent a draft since the last swap, by alias."""
        abilities = first.abilities
        profile = SourceProfile("drafter", first.model, max_length=abilities.max_length)
        self._worker = DrafterWorker(
            first,
            profile,
            self._sent,
            growth=settings.growth,
            nodes_per_pass=settings.nodes_per_pass,
            chunk=settings.prefill_chunk,
        )
        for alias, ids in enumerate(texts):
            self._worker.submit(Follow(_STREAM, alias, SessionKey("bench", f"{alias}"), _request(ids, first)))
        self._worker.take_in(wait=False)
        while self._worker.work():
            pass

    def swap(self) -> dict[str, Any]:
        """Swaps the weights, then works until nothing is left to draft; what that took, in ms and passes."""
        worker, counts = self._worker, self._worker.counts
        self._drafted_s.clear()
        held_s, passes = counts.swap_seconds, counts.passes
        reread_s, reread_ids = counts.reread_seconds, counts.reread_ids
        began_s = time.perf_counter()
        self._next = worker.replace(self._next, "swapped")
        until_drafts = 0
        while worker.work():
            if not until_drafts and len(self._drafted_s) == len(worker.roster):
                until_drafts = counts.passes - passes
        return {
            "held_ms": 1000 * (counts.swap_seconds - held_s),
            "reread_ms": 1000 * (counts.reread_seconds - reread_s),
            "reread_ids": counts.reread_ids - reread_ids,
            "passes_until_drafts": until_drafts,
            "drafts_ms": [1000 * (at - began_s) for at in self._drafted_s.values()],
        }

    def close(self) -> None:
        """Closes all sessions; the drafters stay."""
        for session in list(self._worker.roster):
            self._worker.close(session)

    def _sent(self, outgoing: Mapping[int, Outgoing]) -> None:
        now_s = time.perf_counter()
        for what in outgoing.values():
            if what.refusals:
                raise SystemExit(f"the drafter refused a session: {what.refusals[0][1]}")
            for alias, _ in what.drafts:
                self._drafted_s.setdefault(alias, now_s)


def _request(ids: tuple[int, ...], drafter: Drafter) -> DecodingRequest:
    return DecodingRequest(
        epoch=1,
        ids=ids,
        prompt_length=len(ids),
        limit=drafter.abilities.max_length,
        params=SamplingParams(temperature=0.0),
        seed=0,
        node_limit=16,
        vocabulary_size=drafter.abilities.bound,
    )


def _texts(drafter: str, sessions: int, tokens: int) -> list[tuple[int, ...]]:
    """`tokens` tokens of held-out code for each session; texts begin anew where there are too few."""
    tokenizer = tokenizer_of(drafter)
    encoded = [
        tokenizer.encode(record["prompt"] + record["continuation"]).ids for record in held_out_records(10**6)
    ]
    long = [tuple(ids[:tokens]) for ids in encoded if len(ids) >= tokens]
    if not long:
        raise SystemExit(
            f"--tokens {tokens}: no held-out text is so long; the longest has {max(map(len, encoded))}"
        )
    return list(islice(cycle(long), sessions))


def _middle_and_worst(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "worst": round(max(values), 3)}


def figures(worker: SwappedWorker, repeats: int) -> dict[str, Any]:
    """What swaps took while these sessions were followed; the first swap warms up."""
    swaps = [worker.swap() for _ in range(repeats + 1)][1:]
    counted = [(one["reread_ids"], one["passes_until_drafts"], len(one["drafts_ms"])) for one in swaps]
    if len(set(counted)) != 1:
        raise SystemExit(f"swaps of the same weights read and drafted differently: {sorted(set(counted))}")
    ids, passes, drafted = counted[0]
    return {
        "drafted_again": drafted,
        "reread_ids": ids,
        "passes_until_drafts": passes,
        "held_ms": _middle_and_worst([one["held_ms"] for one in swaps]),
        "reread_ms": _middle_and_worst([one["reread_ms"] for one in swaps]),
        "drafts_ms": _middle_and_worst([ms for one in swaps for ms in one["drafts_ms"]]),
    }


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    settings = DrafterSettings(
        model=flags.drafter, device="cpu", threads=1, passes=flags.passes, cache_dir=cache_for(flags.passes)
    )
    drafters = [load(settings) for _ in range(2)]
    found = {}
    for count in flags.sessions:
        worker = SwappedWorker(settings, drafters, _texts(flags.drafter, count, flags.tokens))
        found[str(count)] = figures(worker, flags.repeats)
        worker.close()
    return {"by_sessions": found}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("swaps", (__doc__ or "").splitlines()[0])
    parser.add_argument("--drafter", default=str(MODELS / "drafter"), help="folder of the drafter")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32], help="followed; one or more")
    parser.add_argument("--tokens", type=int, default=256, help="committed tokens of each session")
    parser.add_argument("--passes", choices=("eager", "compiled"), default="eager", help="of the drafter")
    parser.add_argument("--repeats", type=int, default=20, help="swaps that count")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    flags = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    print_result("swaps", settings_of(flags), started, measure(flags))


if __name__ == "__main__":
    main()
