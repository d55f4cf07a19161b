"""What every criterion is: a function of a tree, the target's rows and, for some, draws and chance."""

from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.errors import InvalidRequest
from speculative.noise import accept_uniform
from speculative.tree import TokenTree

Weights = NDArray[Any]
"""Probabilities by id, [V]: float64 in production; proofs by enumeration pass arrays of fractions."""


class Promise(StrEnum):
    """What a criterion promises of the output, beside plain decoding with the same parameters."""

    SAME_IDS = "same_ids"
    """The very ids, for every seed: the path match."""
    SAME_LAW = "same_law"
    """The joint distribution of the tokens, but not the ids of a seed."""
    RELAXED = "relaxed"
    """Neither: the criterion's own bound is all that holds."""


class TargetRows(Protocol):
    """What the target says after a node; `path_tokens` are the tokens down to the node."""

    def __call__(self, node: int, path_tokens: tuple[int, ...], /) -> int:
        """The target's own token, the one that plain decoding would emit."""

    def probabilities(self, node: int, path_tokens: tuple[int, ...], /) -> Weights:
        """The processed distribution from which plain decoding samples: [V], sum 1."""

    def log_probabilities(self, node: int, path_tokens: tuple[int, ...], /) -> NDArray[np.float64]:
        """Logarithms of the processed distribution; for greedy decoding, of the one before temperature."""


class Chance(Protocol):
    """Independent random decisions, each of which is asked for once."""

    def below(self, probability: Any) -> bool:
        """True with this probability (at least 1: always; at most 0: never)."""

    def choose(self, weights: Weights) -> int:
        """An id, with probability in proportion to its weight; the weights do not sum to 0."""


class KeyedChance:
    """Chance keyed by the request's seed, the round and the number of the decision in the round.

    The round is named by its base, the number of committed ids when it begins. No two rounds of a session
    share a base, so a decision never meets a number that an earlier round has looked at. A key by position
    alone would: block verification looks at numbers of positions that it then does not commit.

    Args:
        seed: seed of the session, unsigned 64 bits.
        base: number of committed ids.
    """

    __slots__ = ("_base", "_index", "_seed")

    def __init__(self, seed: int, base: int) -> None:
        self._seed = seed
        self._base = base
        self._index = 0

    def _uniform(self) -> float:
        self._index += 1
        return accept_uniform(self._seed, self._base, self._index - 1)

    def below(self, probability: Any) -> bool:
        """True with this probability."""
        return bool(self._uniform() < probability)

    def choose(self, weights: Weights) -> int:
        """Chooses an id in proportion to its weight, by inverting the cumulative sum in float64."""
        sums = np.cumsum(weights, dtype=np.float64)
        found = int(np.searchsorted(sums, self._uniform() * sums[-1], side="right"))
        # The product of a subnormal sum can round up to it; ids of no weight behind the last are no choice.
        return min(found, int(np.flatnonzero(weights)[-1]))


class Criterion(Protocol):
    """Decides which drafted tokens a round accepts. Its parameters are fields, checked when it is made."""

    promise: ClassVar[Promise]
    needs_q: ClassVar[bool]
    """Whether it needs the distributions from which drafts were drawn."""

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted nodes and the round's tokens.

        Args:
            tree: the drafts of the round.
            rows: what the target says at each node.
            drawn: which children were drawn and from what; children that are not in it are point masses.
            chance: random decisions of this round.
        """


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raises InvalidRequest where a criterion's parameter is not a number of its range."""
    if not (low < value if open_low else low <= value) or not value <= high:
        start = f"above {low:g}" if open_low else f"{low:g}"
        raise InvalidRequest(f"criterion.{name} is {value:g}; {start} to {high:g} is possible")
