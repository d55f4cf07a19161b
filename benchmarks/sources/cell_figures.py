"""Figures of one set of prompts at one temperature, from the runs of all arms. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.shared.figures import median_of_pairs
from benchmarks.sources.arms import (
    BESIDE_MERGED,
    MERGED,
    PLAIN,
    PLAIN_BESIDE_MERGED,
    CellRuns,
    Runs,
    Turns,
)
from benchmarks.spec_bench.official import arm_figures, speed

_SHOWN = ("acceptance_length", "tokens_per_second", "over_plain")


def cell_figures(cell: CellRuns) -> dict[str, Any]:
    """Figures by arm; the merged arm over the best single one; what each source adds to the others."""
    plain = cell.by_arm[PLAIN]
    figures = {
        name: arm_figures([*runs.values()], [plain[key] for key in runs])
        for name, runs in cell.by_arm.items()
    }
    shown = [name for name in cell.by_arm if name not in BESIDE_MERGED.values()]
    singles = [name for name in shown if name not in (PLAIN, MERGED)]
    best = {repeat: best_single(cell, singles, repeat) for repeat in repeats_of(plain)}
    fastest = {key: _beside_merged(cell, best[key[1]])[key] for key in plain}
    return {
        "identical": all(same_ids(runs, plain) for runs in [*cell.by_arm.values(), *cell.without.values()]),
        **{field: {name: figures[name][field] for name in shown} for field in _SHOWN},
        "round_ms": {name: round_ms(cell.by_arm[name].values()) for name in shown},
        "processor_ms": {name: processor_ms(cell, name) for name in shown},
        "slowdown": {name: round(part, 3) for name, part in cell.slowdown.items()},
        "accepted_share": figures[MERGED]["accepted_share"],
        "best_single": [best[repeat] for repeat in sorted(best)],
        "merged_over_best": paired_speed(cell.by_arm[MERGED], fastest),
        "merged_services_over_others": paired_speed(cell.by_arm[PLAIN_BESIDE_MERGED], plain),
        "marginal": {name: marginal(cell, name) for name in cell.without},
    }


def best_single(cell: CellRuns, singles: Sequence[str], repeat: int) -> str:
    """The fastest of these arms in all repeats but one.

    In the repeat that is left out, luck had no part in the choice. A single repeat has to choose for itself.
    """

    def rate(name: str) -> float:
        runs = cell.by_arm[name]
        turns = [turn for key in runs if key[1] != repeat or len(repeats_of(runs)) == 1 for turn in runs[key]]
        return speed(turns)

    return max(singles, key=rate)


def repeats_of(runs: Runs) -> set[int]:
    """The numbers of an arm's repeats."""
    return {repeat for _, repeat in runs}


def _beside_merged(cell: CellRuns, source: str) -> Runs:
    """A single source's runs, on the services of the merged sources if it ran there."""
    return cell.by_arm.get(BESIDE_MERGED.get(source, source), cell.by_arm[source])


def marginal(cell: CellRuns, source: str) -> dict[str, Any]:
    """What one source adds to the others: accepted tokens for each of its nodes that the target computed.

    A round commits its accepted tokens and one more. So of two arms with equally many tokens, one has as many
    more accepted tokens as it has fewer rounds.
    """
    without = cell.without[source]
    rounds, tokens = counted(without.values())
    merged_rounds, _ = counted(cell.by_arm[MERGED][key] for key in without)
    gained = rounds - merged_rounds
    nodes, own = cell.counts[source]
    return {
        "acceptance_length_without": round(tokens / rounds, 3),
        "nodes": nodes,
        "own_tokens": own,
        "gained_tokens": gained,
        "gained_per_node": round(gained / nodes, 4) if nodes else None,
    }


def counted(runs: Iterable[Turns]) -> tuple[int, int]:
    """Rounds and tokens of all turns."""
    turns = [turn for each in runs for turn in each]
    return sum(turn["rounds"] for turn in turns), sum(len(turn["ids"]) for turn in turns)


def round_ms(runs: Iterable[Turns]) -> float:
    """Milliseconds per round, prompts included."""
    turns = [turn for each in runs for turn in each]
    seconds: float = sum(turn["seconds"] for turn in turns)
    rounds: int = sum(turn["rounds"] for turn in turns)
    return round(1000 * seconds / rounds, 2)


def processor_ms(cell: CellRuns, arm: str) -> dict[str, float]:
    """Milliseconds of processor time per round, by role, prompts included."""
    rounds, _ = counted(cell.by_arm[arm].values())
    return {role: round(1000 * seconds / rounds, 2) for role, seconds in cell.processor_s[arm].items()}


def same_ids(runs: Runs, plain: Runs) -> bool:
    """Whether all turns have the ids of plain decoding."""
    return all(_ids(turns) == _ids(plain[key]) for key, turns in runs.items())


def paired_speed(runs: Runs, others: Runs) -> dict[str, float | int]:
    """The median ratio of the speeds of two arms, question by question and repeat by repeat."""
    return median_of_pairs(speed(turns) / speed(others[key]) for key, turns in runs.items())


def least_merged(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> float:
    """The least of all cells' ratios of the merged sources' speed to that of the best single source."""
    return min(
        float(cell["merged_over_best"]["median"]) for cells in figures.values() for cell in cells.values()
    )


def _ids(turns: Turns) -> Sequence[Sequence[int]]:
    return [turn["ids"] for turn in turns]
