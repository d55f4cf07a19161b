"""Which of the found continuations are worth sending, and how likely the target is to take them.

A corpus says how often each token followed; the target takes the argmax of its processed log-probability plus
noise, and the noise at a position is the same on both sides. So at temperature > 0 children are ranked by
log(count share) + the session's noise, and greedily by count share. How likely is the best of them?

- Either what was found is what the session is about, or it is not. How likely it is grows with how much of
  the session's end was found: a prior per token, since what follows a long match is likely to follow again.
  It multiplies everything else.
- If it is, greedy decoding takes the likeliest token, so that shares are sharpened.
- If it is, and with noise: what was not seen holds the rest of the probability, r, which shrinks as more was
  seen; its largest score is log(r) plus one more Gumbel number, which nobody knows here. A token of score s
  beats it with probability exp(-r e^-s). Among what was seen the larger score is the likelier winner.

The verifier calibrates these online, so their order and shape matter, not their scale. Pure, deterministic.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from retrieval_service.trie import CountedTrie
from speculative.draft import Draft
from speculative.lookup import survival as per_token
from speculative.noise import gumbel_at
from speculative.params import SamplingParams
from speculative.tree import ROOT


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Bounds of drafts, and constants that turn counts into survival."""

    nodes: int = 32
    """Most nodes of one draft."""
    depth: int = 16
    """Longest path from the last committed token to a leaf, in tokens."""
    floor: float = 0.05
    """Survival below which a node is not sent."""
    sharpness: float = 2.0
    """Greedy: the power of the count shares by which the likeliest child stands out."""
    softness: float = 1.0
    """With noise: how far the counts stray from the target's log-probabilities, in nats."""
    unseen: float = 0.2
    """With noise: the weight of all tokens that were never seen, in occurrences."""


@lru_cache(maxsize=4096)
def reach(match_length: int, shape: DraftShape) -> int:
    """Greatest depth at which a node below a match of this length can be worth sending."""
    survival, depth = 1.0, 0
    while depth < shape.depth and (survival := survival * per_token(match_length + depth)) >= shape.floor:
        depth += 1
    return depth


def rank(
    trie: CountedTrie, params: SamplingParams, seed: int, position: int, shape: DraftShape, node_limit: int
) -> Draft | None:
    """The nodes most likely to be accepted, likeliest first; None where all are below the floor.

    Args:
        position: absolute, of the trie's first level: the number of committed ids.
        node_limit: the most nodes; the shape's own limit holds beside it.
    """
    survival = _survival(trie, params, seed, position, shape)
    order = sorted(range(len(trie)), key=lambda node: (-survival[node], node))
    chosen = [node for node in order[: min(node_limit, shape.nodes)] if survival[node] >= shape.floor]
    if not chosen:
        return None
    # Survival never rises along a path and a parent's index is the smaller one, so that parents come first.
    place = {node: index for index, node in enumerate(chosen)}
    return Draft(
        tuple(trie.tokens[node] for node in chosen),
        tuple(ROOT if trie.parents[node] == ROOT else place[trie.parents[node]] for node in chosen),
        tuple(survival[node] for node in chosen),
    )


def _survival(
    trie: CountedTrie, params: SamplingParams, seed: int, position: int, shape: DraftShape
) -> list[float]:
    """Survival of each node: the estimated probability that its whole path is accepted."""
    families: dict[int, list[int]] = {}
    depths = [0] * len(trie)
    for node, parent in enumerate(trie.parents):
        families.setdefault(parent, []).append(node)
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
    noise = None
    if not params.greedy:
        noise = gumbel_at(seed, [position - 1 + depth for depth in depths], trie.tokens).tolist()
    survival = [0.0] * len(trie)
    for parent, family in families.items():  # parents are placed before their children
        above, total = (1.0, trie.occurrences) if parent == ROOT else (survival[parent], trie.counts[parent])
        prior = per_token(trie.match_length + depths[family[0]] - 1)
        shares = [trie.counts[node] / total for node in family]
        if noise is None:
            given = _greedily(shares, prior, shape.sharpness)
        else:
            given = _with_noise(shares, total, prior, [noise[node] for node in family], shape)
        for node, probability in zip(family, given, strict=True):
            survival[node] = above * probability
    return survival


def _greedily(shares: list[float], prior: float, sharpness: float) -> list[float]:
    """Probability of each sibling to be the target's likeliest token."""
    weights = [share**sharpness for share in shares]
    total = sum(weights) + max(0.0, 1.0 - sum(shares)) ** sharpness
    return [prior * weight / total for weight in weights]


def _with_noise(
    shares: list[float], total: int, prior: float, noise: list[float], shape: DraftShape
) -> list[float]:
    """Probability of each sibling to win against its siblings, and against unseen tokens of unknown noise."""
    seen = total / (total + shape.unseen)
    scores = [math.log(seen * share) + drawn for share, drawn in zip(shares, noise, strict=True)]
    best = max(scores)
    weights = [math.exp((score - best) / shape.softness) for score in scores]
    sum_of_weights, rest = sum(weights), 1.0 - seen * sum(shares)
    return [
        prior * weight / sum_of_weights * math.exp(-rest * math.exp(min(-score, 50.0)))
        for weight, score in zip(weights, scores, strict=True)
    ]
