"""Enumeration with exact fractions: a toy target, every outcome of a run, and the law of plain decoding."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from random import Random
from typing import TypeVar

import numpy as np

from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from speculative.stop import StopChecker

Ids = tuple[int, ...]
Weights = tuple[Fraction, ...]
Law = Callable[[Ids], Weights]
Joint = dict[Ids, Fraction]
Sample = Callable[[Weights], int]
T = TypeVar("T")

PROMPT: Ids = (0, 2)
BYTES = (b"a", b"b", b"c")


@dataclass(frozen=True)
class Rules:
    """What ends a request."""

    limit: int = len(PROMPT) + 4
    eos: frozenset[int] = frozenset()
    stops: tuple[bytes, ...] = ()
    min_tokens: int = 0

    def stop_checker(self, ids: Ids) -> StopChecker:
        return StopChecker(
            self.eos,
            self.limit,
            self.stops,
            lambda token: BYTES[token % 3],
            ids,
            len(PROMPT),
            self.min_tokens,
        )

    def applied(self, law: Law) -> Law:
        """The law with what min_tokens holds back, by the production processing."""
        return lambda ids: self.held_back(law(ids), History.of(ids, len(PROMPT)))

    def held_back(self, weights: Weights, history: History) -> Weights:
        params = SamplingParams(min_tokens=self.min_tokens, stop_ids=tuple(self.eos))
        scores = process_logits(np.zeros(len(weights)), params, history)
        left = [
            weight if score > -np.inf else Fraction(0) for weight, score in zip(weights, scores, strict=True)
        ]
        return tuple(weight / sum(left) for weight in left) if any(left) else weights


RULES = [
    Rules(),
    Rules(eos=frozenset({1})),
    Rules(stops=(b"ab", b"cc")),
    Rules(limit=len(PROMPT) + 2, eos=frozenset({2})),
    Rules(eos=frozenset({1}), stops=(b"ca", b"a"), min_tokens=2),
]


def random_law(seed: int, width: int = 3) -> Law:
    """Random rational weights for every context; zeros occur."""

    @cache
    def law(ids: Ids) -> Weights:
        random = Random(f"{seed} {ids}")
        parts = [random.randrange(5) for _ in range(width)]
        parts[random.randrange(width)] += 1
        return tuple(Fraction(part, sum(parts)) for part in parts)

    return law


def penalised(weights: Weights, output: Ids) -> Weights:
    """A presence penalty in the language of weights: a third for whatever the output has."""
    parts = [weight / 3 if token in output else weight for token, weight in enumerate(weights)]
    return tuple(part / sum(parts) for part in parts)


def outcomes(run: Callable[[Sample], T]) -> Iterator[tuple[T, Fraction]]:
    """Every result of `run` with its exact weight, by trying each token at each place it samples."""
    script: list[int] | None = []
    while script is not None:
        trial = Trial(script)
        yield run(trial.sample), trial.weight
        script = trial.next_script()


class Trial:
    """One run: takes the scripted choice at each place, and the first possible one past the script's end."""

    def __init__(self, script: list[int]) -> None:
        self.weight = Fraction(1)
        self._script = script
        self._taken: list[tuple[int, int]] = []  # which of how many possible tokens

    def sample(self, weights: Weights) -> int:
        possible = [token for token, weight in enumerate(weights) if weight]
        place = len(self._taken)
        choice = self._script[place] if place < len(self._script) else 0
        self._taken.append((choice, len(possible)))
        self.weight *= weights[possible[choice]]
        return possible[choice]

    def next_script(self) -> list[int] | None:
        """Counts the last place that has another token up by one; None when all is tried."""
        taken = self._taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return None
        return [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


def plain(law: Law, rules: Rules) -> Callable[[Ids], Joint]:
    """The law of plain decoding from any ids on."""

    @cache
    def from_ids(ids: Ids) -> Joint:
        if rules.stop_checker(ids).finished:
            return {ids: Fraction(1)}
        joint: Joint = defaultdict(Fraction)
        for token, weight in enumerate(law(ids)):
            if weight:
                for whole, rest in from_ids((*ids, token)).items():
                    joint[whole] += weight * rest
        return dict(joint)

    return from_ids
