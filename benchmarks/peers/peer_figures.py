"""Figures of the arms over a grid of temperatures, streams and threads. Pure; knows no process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.shared.figures import TimedRun, acceptance_length, paired_ratio, same_ids, tokens_per_second

PLAIN, SPECULATIVE, GENERATE, LLAMA = "outrider_plain", "outrider_speculative", "hf_generate", "llama_"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms are compared under: a temperature, streams at once, and compute threads."""

    temperature: float
    streams: int
    threads: int


Runs = Mapping[Setting, Sequence[TimedRun]]
"""Runs of all arms by setting. A run is a batch of streams; its `prompt` numbers the batch, and its ids are
those of one stream after another, equally many of each."""


def by_setting(values: Iterable[tuple[Setting, Any]]) -> dict[str, Any]:
    """Values by temperature, then streams, then threads, as the result has them."""
    nested: dict[str, Any] = {}
    for at, value in values:
        nested.setdefault(str(at.temperature), {}).setdefault(str(at.streams), {})[str(at.threads)] = value
    return nested


def rates(runs: Runs) -> dict[str, Any]:
    """Tokens a second by arm and setting."""
    return {
        arm: by_setting(
            (at, tokens_per_second(_of(arm, done))) for at, done in runs.items() if _of(arm, done)
        )
        for arm in arms_of(runs)
    }


def over_generate(runs: Runs) -> dict[str, Any]:
    """The median rate of every arm over that of transformers' `generate`, by arm and setting."""
    return {
        arm: by_setting(
            (at, round(tokens_per_second(_of(arm, done)) / tokens_per_second(_of(GENERATE, done)), 3))
            for at, done in runs.items()
            if _of(arm, done)
        )
        for arm in arms_of(runs)
        if arm != GENERATE
    }


def plain_over_llama(runs: Runs) -> dict[str, Any]:
    """Rates of our plain decoding over the faster of llama.cpp's, same batch and repeat, by setting."""
    return by_setting(
        (at, paired_ratio(done, PLAIN, _fastest(done, f"{LLAMA}plain"))) for at, done in runs.items()
    )


def best_over_llama(runs: Runs) -> dict[str, Any]:
    """Our best speculation over llama.cpp's best arm, by temperature and streams, whatever the threads."""
    found: dict[str, Any] = {}
    for at in dict.fromkeys(replace(setting, threads=0) for setting in runs):
        named = [
            replace(run, arm=f"{run.arm} x{setting.threads}")
            for setting, done in runs.items()
            if replace(setting, threads=0) == at
            for run in done
        ]
        ours = _fastest(named, SPECULATIVE)
        theirs = _fastest(named, LLAMA)
        found.setdefault(str(at.temperature), {})[str(at.streams)] = {
            "speculative": ours,
            "llama": theirs,
            "ratio": paired_ratio(named, ours, theirs),
        }
    return found


def ids_equal_generate(runs: Runs) -> dict[str, float]:
    """The share of greedy streams whose ids are those of `generate` for the prompt alone, by arm."""
    alone = [done for at, done in runs.items() if at.temperature == 0 and at.streams == 1]
    reference = {run.prompt: run.ids for run in _of(GENERATE, alone[0])}
    equal: dict[str, list[bool]] = {}
    for at, done in runs.items():
        for run in streams_of(at, done) if at.temperature == 0 else ():
            equal.setdefault(run.arm, []).append(run.ids == reference[run.prompt])
    return {arm: round(sum(same) / len(same), 4) for arm, same in equal.items()}


def identical(runs: Runs, temperature: float, arms: Sequence[str]) -> bool:
    """Whether these arms gave each prompt one sequence of ids in all settings of a temperature."""
    of_temperature = ((at, done) for at, done in runs.items() if at.temperature == temperature)
    return same_ids([run for at, done in of_temperature for run in streams_of(at, done)], arms)


def streams_of(at: Setting, runs: Iterable[TimedRun]) -> list[TimedRun]:
    """A run for each stream of the batches, numbered by its prompt; a batch holds prompts in a row."""
    streams = []
    for run in runs:
        tokens = len(run.ids) // at.streams
        for place in range(at.streams):
            ids = run.ids[place * tokens : (place + 1) * tokens]
            streams.append(replace(run, prompt=run.prompt * at.streams + place, ids=ids))
    return streams


def arms_of(runs: Runs) -> list[str]:
    """Names of all arms, in the order of their first runs."""
    return list(dict.fromkeys(run.arm for done in runs.values() for run in done))


def acceptance(runs: Runs) -> dict[str, Any]:
    """Acceptance length of our speculation by setting."""
    return by_setting((at, acceptance_length(_of(SPECULATIVE, done))) for at, done in runs.items())


def _of(arm: str, runs: Iterable[TimedRun]) -> list[TimedRun]:
    return [run for run in runs if run.arm == arm]


def _fastest(runs: Sequence[TimedRun], prefix: str) -> str:
    """The arm with the highest rate among those whose names begin with `prefix`."""
    names = {run.arm for run in runs if run.arm.startswith(prefix)}
    return max(sorted(names), key=lambda arm: tokens_per_second(_of(arm, runs)))
