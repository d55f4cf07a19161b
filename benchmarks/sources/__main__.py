"""Measures what draft sources gain alone, merged, and beside each other, on four sets of prompts.

Run as `outrider bench sources --json`. docs/figures/sources.md says what each field means.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import HELD_OUT, load_prompts, tokenizer_of
from benchmarks.shared.services import UpServices
from benchmarks.sources.arms import SourceRuns, Stack, Stacks
from benchmarks.sources.cell_figures import cell_figures, least_merged
from benchmarks.sources.noise_trees import tree_figures
from benchmarks.sources.prompt_sets import SETS, prompt_set
from outrider.cli.local.demo_corpus import demo_corpus
from outrider.client import Client
from outrider.tokens import TokenTable
from outrider.wire.names import REFERENCES

CORPUS = "corpus"
SOURCES = ("lookup", "drafter", CORPUS, REFERENCES)
COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # every arm asks the same questions


def source_figures(settings: argparse.Namespace) -> dict[str, Any]:
    """Figures of the services by set and temperature."""
    corpora = _corpora(settings) if CORPUS in settings.sources else ()
    with ExitStack() as held:
        stacks = Stacks(*[_stack(settings, corpora, held) for _ in Stacks._fields])
        cells = [
            SourceRuns(
                stacks,
                prompt_set(name, settings.target, settings.prompts),
                temperature,
                settings.sources,
                settings.tokens,
            )
            for name in settings.sets
            for temperature in settings.temperatures
        ]
        for cell in cells[: len(settings.temperatures)]:
            cell.warm_up()
        for repeats in (settings.warm_ups, settings.repeats):
            for cell in cells:
                cell.forget()
            for number in range(repeats):
                for cell in cells:
                    cell.repeat(number, is_last=number == repeats - 1)
    figures: dict[str, Any] = {}
    for cell in cells:
        figures.setdefault(cell.prompts.name, {})[f"{cell.temperature:g}"] = cell_figures(cell.cell)
    return figures


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    figures = source_figures(settings) if settings.sets else {}
    trees = tree_figures(
        (settings.target, settings.drafter),
        load_prompts(settings.target, settings.tree_prompts),
        settings.temperatures,
        settings.tree_nodes,
        settings.tokens,
    )
    return {
        "identical": all(cell["identical"] for cells in figures.values() for cell in cells.values()),
        "figures": figures,
        "least_merged_over_best": least_merged(figures) if figures else None,
        "trees": trees,
    }


def _stack(settings: argparse.Namespace, corpora: Sequence[Path], held: ExitStack) -> Stack:
    services = held.enter_context(
        UpServices(settings.target, settings.drafter, passes=settings.passes, corpora=corpora, **COLD)
    )
    return Stack(services, held.enter_context(Client(services.address)))


def _corpora(settings: argparse.Namespace) -> Sequence[Path]:
    tokens = TokenTable.from_json(tokenizer_of(settings.target).to_str())
    return (demo_corpus(tokens, HELD_OUT),)


def _listed(of: Callable[[str], Any] = str, allowed: Sequence[str] = ()) -> Callable[[str], list[Any]]:
    """A parser of comma-separated values, each of which is `allowed` where anything is."""

    def parse(text: str) -> list[Any]:
        parts = [part for part in text.split(",") if part]
        for part in parts:
            if allowed and part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(allowed)}")
        return [of(part) for part in parts]

    return parse


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("sources", __doc__)
    add_pair(parser)
    parser.add_argument(
        "--sets",
        type=_listed(allowed=SETS),
        default=list(SETS),
        help=f"sets of prompts, comma-separated: {', '.join(SETS)}; empty: trees alone",
    )
    parser.add_argument(
        "--temperatures", type=_listed(float), default=[0.0, 0.7, 1.0], help="comma-separated"
    )
    parser.add_argument(
        "--sources",
        type=_listed(allowed=SOURCES),
        default=list(SOURCES),
        help=f"sources, comma-separated: {', '.join(SOURCES)}; references draft in edits alone",
    )
    parser.add_argument("--prompts", type=int, default=3, help="requests of each set, at most")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of every arm on every request")
    parser.add_argument(
        "--warm-up",
        dest="warm_ups",
        type=int,
        default=0,
        help="repeats before those that count, in which the services learn what their sources are worth",
    )
    parser.add_argument("--passes", default="eager", help="passes of the target, as in `outrider up`")
    parser.add_argument("--tree-prompts", type=int, default=4, help="prompts that trees are compared on")
    parser.add_argument(
        "--tree-nodes", type=_listed(int), default=[4, 8, 16], help="nodes of a tree, comma-separated"
    )
    settings = parser.parse_args()
    if not settings.sources and settings.sets:
        parser.error("--sources is empty: name at least one source, or no --sets")
    return settings


def main() -> None:
    """Measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    print_result("sources", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
