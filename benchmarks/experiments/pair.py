"""The pair that experiments are put to, and the target's own texts, each computed once.

The target's continuations never depend on drafts, so they are computed first. What a drafter would have
drafted behind each of their places then decides every round of every arm, without any clock.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.heldout import load_prompts
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Truth, continuation
from speculative.digest import HostDigest
from speculative.lookup.suffix_automaton import SuffixAutomaton
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.ranking import ChildRanker

SCALE = 0.65
"""Spread of the target's logits around the drafter's, as the drafter service assumes it."""
MOST_HELD_OUT = 24


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of an experiment is run."""

    prompts: int
    tokens: int
    """Tokens that the target writes for each prompt."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a drafter chose at each place of a text, given the target's own tokens before that place."""

    right: NDArray[np.bool_]
    """Whether the choice is the target's token."""
    survival: NDArray[np.float64]
    """The drafter's estimate that the choice is right, as the drafter service sends it."""
    probability: NDArray[np.float64]
    """The choice's probability under the drafter, without noise."""
    entropy: NDArray[np.float64]
    """Entropy of the drafter's distribution, in nats."""


class ModelPair:
    """A target, a drafter, and the texts that the target wrote.

    Args:
        target: folder of the target.
        drafter: folder of the drafter.
        scale: how many prompts and tokens.
    """

    def __init__(self, target: Path, drafter: Path, scale: Scale) -> None:
        self.target_path, self.drafter_path, self.scale = target, drafter, scale
        self._texts: dict[tuple[float, int], list[Truth]] = {}

    @cached_property
    def target(self) -> PackedLM:
        """The target, in float32."""
        return PackedLM.load(self.target_path, check=False)

    @cached_property
    def drafter(self) -> PackedLM:
        """The drafter, in float32."""
        return PackedLM.load(self.drafter_path, check=False)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """The first held-out prompts."""
        return load_prompts(self.target_path, min(self.scale.prompts, MOST_HELD_OUT))

    def texts(self, temperature: float, first_seed: int = 0) -> list[Truth]:
        """The target's continuation of every prompt, decoded plainly; prompt i has seed `first_seed` + i."""
        key = temperature, first_seed
        if key not in self._texts:
            print(f"the target writes at temperature {temperature:g}", file=sys.stderr)
            self._texts[key] = self.write(self.prompts, temperature, self.scale.tokens, first_seed)
        return self._texts[key]

    def are_plain(self, temperature: float, answers: Sequence[Sequence[int]]) -> bool:
        """Whether answers to all prompts begin with plain decoding's ids, which end at an end of sequence."""
        plain = [text.ids[text.prompt_length :] for text in self.texts(temperature)]
        return all(tuple(ids[: len(own)]) == own for ids, own in zip(answers, plain, strict=True))

    def write(
        self, prompts: Sequence[Sequence[int]], temperature: float, tokens: int, first_seed: int = 0
    ) -> list[Truth]:
        """The target's continuations of these prompts; prompt i has seed `first_seed` + i."""
        params = SamplingParams(temperature=temperature)
        return [
            continuation(self.target, prompt, params, seed, tokens)
            for seed, prompt in enumerate(prompts, start=first_seed)
        ]


def logits_along(lm: PackedLM, ids: Sequence[int], start: int) -> NDArray[np.float32]:
    """Logits for the tokens from place `start` on, given all tokens before each: float32[n, V]."""
    table = lm.table(len(ids))
    rows = len(ids) - 1
    wanted = range(start - 1, rows)
    outcome = lm.forward([SequenceRows(table, list(ids[:-1]), range(-1, rows - 1), list(wanted))])
    found = outcome.rows().copy()
    lm.release(table)
    return found


def ranker_of(lm: PackedLM, text: Truth, *, with_noise: bool = True) -> ChildRanker:
    """Ranks the drafter's choices for a text as the drafter service does.

    Args:
        with_noise: whether choices add the session's noise; without, a sampled request is drafted greedily.
    """
    params = text.params if with_noise else SamplingParams(temperature=0.0)
    width = lm.vocabulary_size
    prompt = text.ids[: text.prompt_length]
    return ChildRanker(
        params,
        text.seed,
        prompt,
        text.prompt_length,
        width=width,
        bound=width,
        children=1,
        scale=SCALE,
        noise=None if params.greedy else NoiseRows(text.seed, width),
    )


def guesses_of(lm: PackedLM, text: Truth, *, with_noise: bool = True) -> Guesses:
    """The drafter's choices along a text."""
    ranker = ranker_of(lm, text, with_noise=with_noise)
    start = text.prompt_length
    logits = logits_along(lm, text.ids, start)
    right, survival, probability, entropy = [], [], [], []
    for place, row in enumerate(logits):
        ((token, estimate),) = ranker.children(HostDigest(row), start + place, ())
        log_q = log_softmax(row)
        right.append(token == text.ids[start + place])
        survival.append(estimate)
        probability.append(float(np.exp(log_q[token])))
        entropy.append(float(-(np.exp(log_q) * log_q).sum()))
    columns = (np.array(survival), np.array(probability), np.array(entropy))
    return Guesses(np.array(right, dtype=np.bool_), *columns)


def rights(lm: PackedLM, texts: Sequence[Truth], *, with_noise: bool = True) -> list[list[bool]]:
    """Whether the drafter is right, at each place of each text."""
    return [guesses_of(lm, text, with_noise=with_noise).right.tolist() for text in texts]


def log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities of one row of logits."""
    shifted = row.astype(np.float64) - float(row.max())
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


def lookup_accepts(text: Truth, most: int) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each round that only a lookup in the session's own text drafts for.

    Args:
        most: most tokens of a draft.
    """
    own, place, rounds = SuffixAutomaton(list(text.ids[: text.prompt_length])), text.prompt_length, []
    while place < len(text.ids):
        drafted = own.draft(most).tokens
        rest = text.ids[place:]
        right = [token == wanted for token, wanted in zip(drafted, rest[:-1], strict=False)]
        accepted = leading(right.__getitem__, len(right))
        rounds.append((len(drafted), accepted))
        for token in rest[: accepted + 1]:
            own.append(token)
        place += accepted + 1
    return rounds


def leading(is_right: Callable[[int], bool], most: int) -> int:
    """How many of the first `most` numbers hold, counted until one does not."""
    return next((at for at in range(most) if not is_right(at)), most)
