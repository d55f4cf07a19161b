"""The walk that the relaxed criteria share: the deepest path all of whose tokens pass.

The token that the target itself would emit always passes. So on equal trees a relaxed round accepts at least
as many tokens as the path match, and a token that does not pass is never likelier than under the target.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.acceptance.criterion import TargetRows
from speculative.acceptance.path_match import Match
from speculative.tree import ROOT, TokenTree


class Place(NamedTuple):
    """A drafted token that is judged, and what the target says where it stands."""

    node: int
    token: int
    depth: int
    """Depth of the node in the tree; 1 below the last committed token."""
    logprobs: NDArray[np.float64]
    """Log-probabilities of all ids at the token's place: float64[V]."""


Passes = Callable[[Place], bool]


class Reached(NamedTuple):
    """A path of passing tokens."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    own: tuple[int, ...]
    """The target's own token at each place of the path."""
    logprobs: tuple[float, ...]
    """Log-probability of each token of the path."""


def deepest_path(tree: TokenTree, rows: TargetRows, passes: Passes) -> Match:
    """The deepest passing path, ties to the likeliest, then the target's own token."""
    return close(likeliest(reached_paths(tree, rows, passes).values()), rows)


def likeliest(found: Iterable[Reached]) -> Reached:
    """The deepest path, ties to the likeliest."""
    return max(found, key=lambda path: (len(path.path), sum(path.logprobs)))


def reached_paths(tree: TokenTree, rows: TargetRows, passes: Passes) -> dict[int, Reached]:
    """The path to each node that passes with all nodes above it, by node; -1 is the empty path."""
    reached = {ROOT: Reached((), (), (), ())}
    said: dict[int, tuple[int, NDArray[np.float64]]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = reached.get(parent)
        if above is None:
            continue
        if parent not in said:
            said[parent] = rows(parent, above.tokens), rows.log_probabilities(parent, above.tokens)
        own, logprobs = said[parent]
        # Cuts, min_tokens and banned ids leave some ids no chance at all, and no criterion gives them one.
        possible = logprobs[token] > -math.inf
        if token == own or (possible and passes(Place(node, token, len(above.path) + 1, logprobs))):
            reached[node] = Reached(
                (*above.path, node),
                (*above.tokens, token),
                (*above.own, own),
                (*above.logprobs, float(logprobs[token])),
            )
    return reached


def close(found: Reached, rows: TargetRows) -> Match:
    """The path and the target's own token behind it."""
    last = found.path[-1] if found.path else ROOT
    return Match(found.path, (*found.tokens, rows(last, found.tokens)))


def cut(found: Reached, length: int) -> Reached:
    """The first `length` nodes of a path."""
    path, tokens, own, logprobs = found
    return Reached(path[:length], tokens[:length], own[:length], logprobs[:length])


def rank(logprobs: NDArray[np.float64], token: int) -> int:
    """How many ids the target ranks before the token, by (log-probability descending, id ascending)."""
    level = logprobs[token]
    return int(np.count_nonzero(logprobs > level) + np.count_nonzero(logprobs[:token] == level))
