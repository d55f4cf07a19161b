"""Measures drafts that are copied from a reference: the answer itself, with some of its tokens replaced.

Run as `outrider bench references --json`. docs/figures/references.md says what each field means.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import torch

from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.shared.cache_dir import cache_for
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, alternating_orders, paired_ratio, tokens_per_second
from benchmarks.shared.heldout import load_prompts, tokenizer_of
from outrider.wire.names import REFERENCES
from speculative.params import SamplingParams
from verifier_service.settings import VerifierSettings

PLAIN = "plain"
MODES = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8)}


def replaced(ids: Sequence[int], share: float, vocabulary_size: int, seed: int) -> tuple[int, ...]:
    """The ids, each of which is replaced by any id of the vocabulary with probability `share`."""
    chance = random.Random(seed)
    return tuple(chance.randrange(vocabulary_size) if chance.random() < share else id_ for id_ in ids)


class ReferenceRuns:
    """Runs of one mode: plain decoding, and decoding beside references of each share of replaced tokens.

    Args:
        settings: the benchmark's flags.
        engines: `PLAIN`, and one engine for each share of replaced tokens.
        prompts: token ids of each prompt.
        mode: a key of MODES.
    """

    def __init__(
        self,
        settings: argparse.Namespace,
        engines: dict[str, MeteredEngine],
        prompts: Sequence[tuple[int, ...]],
        mode: str,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._tokens = settings.tokens
        self._params = MODES[mode]
        size = tokenizer_of(settings.target).get_vocab_size()
        answers = [self._decoded(PLAIN, at, ()).ids[0] for at in range(len(prompts))]
        self._references = {
            name: [
                () if name == PLAIN else replaced(answer, float(name) / 100, size, at)
                for at, answer in enumerate(answers)
            ]
            for name in engines
        }
        self._answers = answers
        self._runs: list[tuple[TimedRun, DecodedStreams]] = []

    def repeat(self, number: int) -> None:
        """Runs every engine on every prompt once more, in alternating order (ABBA)."""
        orders = islice(alternating_orders(self._engines), number, None)
        for at in range(len(self._prompts)):
            for name in next(orders):
                done = self._decoded(name, at, self._references[name][at])
                timed = TimedRun(name, at, number, done.counted, done.seconds, done.counts.rounds)
                self._runs.append((timed, done))

    def fields(self) -> dict[str, Any]:
        """The figures of each share of replaced tokens, by the share in per cent."""
        return {name: self._figures(name) for name in self._engines if name != PLAIN}

    def _figures(self, name: str) -> dict[str, Any]:
        timed = [timed for timed, _ in self._runs]
        own = [(one, done) for one, done in self._runs if one.arm == name]
        rounds = sum(done.counts.rounds for _, done in own)
        accepted = sum(done.counts.accepted.get(REFERENCES, 0) for _, done in own)
        return {
            "identical": all(done.ids[0] == self._answers[one.prompt] for one, done in own),
            "acceptance_length": round(sum(len(done.counted) for _, done in own) / rounds, 3),
            "tokens_per_second": tokens_per_second(one for one, _ in own),
            "over_plain": paired_ratio(timed, name, PLAIN),
            "nodes_per_round": round(sum(done.counts.nodes for _, done in own) / rounds, 2),
            "accepted_share": round(accepted / max(1, sum(done.counts.nodes for _, done in own)), 4),
            "draft_ms": round(1000 * sum(done.drafting_s for _, done in own) / rounds, 4),
        }

    def _decoded(self, name: str, at: int, reference: Sequence[int]) -> DecodedStreams:
        engine = self._engines[name]
        return engine.decode([self._prompts[at]], self._tokens, self._params, 1000 + at, reference)


def engines_of(settings: argparse.Namespace) -> dict[str, MeteredEngine]:
    """An engine for plain decoding, and one for each share of replaced tokens."""
    verifier = VerifierSettings(
        model=settings.target,
        budget=settings.budget,
        threads=1,
        kv_mb=256,
        passes=settings.passes,
        cache_dir=cache_for(settings.passes),
    )
    plain = MeteredEngine(verifier, (), settings.nodes)
    costs = deepcopy(plain.costs)  # one measurement for all, so that they differ by their references alone
    shares = {
        name: MeteredEngine(verifier, (REFERENCES,), settings.nodes, costs)
        for name in settings.replaced.split(",")
    }
    return {PLAIN: plain} | shares


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    engines = engines_of(settings)
    prompts = load_prompts(settings.target, settings.prompts)
    for engine in engines.values():
        engine.decode(prompts[:1], min(24, settings.tokens), MODES["greedy"], 0)
    runs = {mode: ReferenceRuns(settings, engines, prompts, mode) for mode in MODES}
    for number in range(settings.repeats):
        for one in runs.values():
            one.repeat(number)
        print(f"repeat {number + 1} of {settings.repeats}", file=sys.stderr)
    figures = {mode: one.fields() for mode, one in runs.items()}
    rows = [row for by_share in figures.values() for row in by_share.values()]
    return {"identical": all(row["identical"] for row in rows), "figures": figures}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("references", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=6, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each request")
    parser.add_argument("--nodes", type=int, default=64, help="drafted nodes of a round")
    parser.add_argument("--replaced", default="0,2,10", help="replaced tokens of references, in per cent")
    parser.add_argument("--budget", default="adaptive", choices=("adaptive", "fixed"))
    parser.add_argument(
        "--passes",
        choices=("eager", "compiled"),
        default="eager",
        help="passes of the target, as `--passes` of the verifier",
    )
    parser.add_argument("--repeats", type=int, default=2, help="repeats of every run")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    print_result("references", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
