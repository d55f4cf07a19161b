"""What choosing a token costs: a small random model with a real vocabulary, through all services.

Run as `outrider bench vocabulary --json`. docs/figures/vocabulary.md says what each field means.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, alternating_orders
from benchmarks.shared.services import HfPeer, UpServices
from benchmarks.vocabulary.arms import (
    ARMS,
    GENERATE,
    TEMPERATURE,
    TOP_P,
    VocabularyArms,
)
from benchmarks.vocabulary.random_model import save_random_llama
from outrider.lm.compiled.row_kernel import use_row_kernel
from outrider.runtime.settings import cache_folder
from speculative.noise import leads
from speculative.sampling_kernel import current_kernel

HEADS = ("flat", "peaked")
SERVICE_SETTINGS: dict[str, Any] = {
    "OUTRIDER_VERIFIER__PREFIX_CACHE": "false",  # every arm repeats the prompts
    "OUTRIDER_VERIFIER__KV_MB": "256",
}
NOISE_DRAWS = 20
"""Rows of noise bits that are timed before each batch of runs."""


def noise_bits_ms(vocabulary: int) -> list[float]:
    """Milliseconds that the raw noise bits of one position take in this process, several times."""
    times = []
    for position in range(NOISE_DRAWS):
        began = time.perf_counter()
        leads(7, position, vocabulary)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def tokens_of(arm: str, streams: int, settings: argparse.Namespace) -> int:
    """Tokens of each stream; `generate` slows down with the batch and gets fewer."""
    tokens: int = max(2, settings.tokens // 2 if streams > 1 else settings.tokens)
    return max(2, min(tokens, settings.generate_tokens // streams)) if arm.startswith(GENERATE) else tokens


class ModelFigures:
    """All runs of one model, and how the verifier chose the tokens."""

    def __init__(self, streams: Sequence[int]) -> None:
        self.streams = streams
        self.runs: list[TimedRun] = []
        self.noise_ms: list[float] = []
        self._chosen: dict[str, tuple[float, ...]] = {}
        """Tokens chosen, those from a whole row of logits, and bytes from a device, by arm."""

    def time(self, arms: VocabularyArms, arm: str, streams: int, tokens: int, repeat: int) -> None:
        """Runs and counts one batch."""
        before = arms.chosen()
        self.runs.append(arms.run(arm, streams, tokens, repeat))
        known = self._chosen.get(arm, (0.0, 0.0, 0.0))
        grown = zip(known, before, arms.chosen(), strict=True)
        self._chosen[arm] = tuple(sum_ + after - earlier for sum_, earlier, after in grown)

    def rates(self, arm: str) -> dict[str, float]:
        """Tokens per second by number of streams, of the fastest repeat: other work only slows one down."""
        return {
            str(count): round(max(r.rate for r in self.runs if r.arm == arm and r.prompt == count), 1)
            for count in self.streams
        }

    def rows_fetched(self, arm: str) -> float:
        """Tokens per 1,000 that were chosen from a whole row of logits."""
        chosen, whole, _ = self._chosen[arm]
        return round(1e3 * whole / chosen, 2)

    def bytes_down(self, arm: str) -> float:
        """Bytes that came from a device per token chosen; 0 on a CPU."""
        chosen, _, down = self._chosen[arm]
        return round(down / chosen, 1)


def measure(folder: Path, vocabulary: int, settings: argparse.Namespace) -> ModelFigures:
    """Runs every arm of one model with each number of streams; the arms take turns."""
    figures = ModelFigures(settings.streams)
    with (
        UpServices(str(folder), "none", passes=settings.passes, **SERVICE_SETTINGS) as services,
        HfPeer(str(folder), None) as peer,
    ):
        arms = VocabularyArms(services, None if settings.no_generate else peer, vocabulary)
        for arm in arms.names():
            arms.run(arm, 2, 4, 0)  # untimed
        for streams in settings.streams:
            orders = alternating_orders(arms.names())
            for repeat in range(settings.repeats):
                figures.noise_ms += noise_bits_ms(vocabulary)
                for arm in next(orders):
                    figures.time(arms, arm, streams, tokens_of(arm, streams, settings), repeat)
            print(f"{folder.name}: {streams} streams done", file=sys.stderr)
    return figures


Rates = dict[str, dict[str, dict[str, float]]]
"""A figure of one vocabulary by arm, head and number of streams."""


def fields_of_vocabulary(by_head: dict[str, ModelFigures], compared: bool) -> dict[str, Any]:
    """The fields of one vocabulary, by arm, head and number of streams."""
    rates: Rates = {arm: {head: f.rates(arm) for head, f in by_head.items()} for arm in ARMS}
    noise_ms = min([ms for figures in by_head.values() for ms in figures.noise_ms])
    added = _of_sampled(rates, lambda rate, greedy: 1e3 / rate - 1e3 / greedy)
    fields: dict[str, Any] = {
        "tokens_per_second": rates,
        "sampled_over_greedy": _of_sampled(rates, lambda rate, greedy: rate / greedy),
        "added_ms": added,
        "noise_bits_ms": round(noise_ms, 4),
        "added_over_noise_bits": {
            arm: {head: {n: round(ms / noise_ms, 3) for n, ms in of.items()} for head, of in heads.items()}
            for arm, heads in added.items()
        },
        "rows_fetched_per_1000": {
            arm: {head: f.rows_fetched(arm) for head, f in by_head.items()} for arm in ARMS
        },
        "bytes_down_per_token": {
            arm: {head: f.bytes_down(arm) for head, f in by_head.items()} for arm in ARMS
        },
    }
    if compared:
        theirs = {arm: {head: f.rates(GENERATE + arm) for head, f in by_head.items()} for arm in ARMS}
        fields["generate_tokens_per_second"] = theirs
        fields["over_generate"] = {
            arm: {
                head: {n: round(rate / theirs[arm][head][n], 3) for n, rate in of.items()}
                for head, of in heads.items()
            }
            for arm, heads in rates.items()
        }
    return fields


def _of_sampled(rates: Rates, figure: Any) -> Rates:
    """A figure of each sampled arm's rate and the greedy one's, rounded."""
    return {
        arm: {
            head: {n: round(figure(rate, rates["greedy"][head][n]), 4) for n, rate in of.items()}
            for head, of in heads.items()
        }
        for arm, heads in rates.items()
        if arm != "greedy"
    }


def by_field(by_vocabulary: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Turns fields by vocabulary into vocabularies by field."""
    names = next(iter(by_vocabulary.values())).keys()
    return {name: {size: fields[name] for size, fields in by_vocabulary.items()} for name in names}


def parse() -> argparse.Namespace:
    """Parses the flags."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = command_line("vocabulary", __doc__, is_curve=True)
    parser.add_argument("--ids", type=numbers, default=[4096, 128256], help="vocabularies, comma-separated")
    parser.add_argument(
        "--streams", type=numbers, default=[1, 8, 32], help="streams at once, comma-separated"
    )
    parser.add_argument(
        "--heads", type=lambda text: text.split(","), default=list(HEADS), help="flat, peaked or both"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens of a single stream; many get half of it"
    )
    parser.add_argument(
        "--generate-tokens", type=int, default=1024, help="the most tokens of one batch of `generate`"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats of every arm")
    parser.add_argument("--passes", default="compiled", help="our passes, as `outrider up --passes` says")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers' `generate` out")
    return parser.parse_args()


def main() -> None:
    """Builds the models, starts the services for each, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    use_row_kernel(cache_folder(), lambda: False)  # the services draw by it, too, wherever it can be had
    by_vocabulary: dict[str, Any] = {}
    nucleus: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-vocabulary-") as root:
        for vocabulary in settings.ids:
            by_head, nucleus[str(vocabulary)] = {}, {}
            for head in settings.heads:
                folder = Path(root) / f"{head}-{vocabulary}"
                found = save_random_llama(folder, vocabulary, head == "peaked", TEMPERATURE, TOP_P)
                nucleus[str(vocabulary)][head] = found._asdict()
                by_head[head] = measure(folder, vocabulary, settings)
            by_vocabulary[str(vocabulary)] = fields_of_vocabulary(by_head, not settings.no_generate)
    fields = {"nucleus": nucleus} | by_field(by_vocabulary)
    fields["noise_bits_by"] = "numpy" if current_kernel() is None else "kernel"
    fields["threads"] = {"verifier": 1, "orchestrator": 1, "hf": 1}
    print_result("vocabulary", settings_of(settings), started, fields, settings.plot)


if __name__ == "__main__":
    main()
