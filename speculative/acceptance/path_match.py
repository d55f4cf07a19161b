"""Follow the target's own tokens down the draft tree; lossless for any drafts, at any temperature.

This is "sample and match": one token s ~ p(. | prefix) per visited node; go to the child that carries s, else
stop and emit s. With noise keyed by position, s is a function of prefix and seed, which makes the rule the
Gumbel-coupled, drafter-invariant one (Daliri, Musco and Suresh, arXiv 2408.07978) and, with no noise, greedy
verification.
"""

from collections.abc import Callable
from typing import NamedTuple

from speculative.logprobs import TokenLogprob
from speculative.tree import ROOT, TokenTree


class Match(NamedTuple):
    """Nodes and tokens that a round accepts."""

    path: tuple[int, ...]
    """Indices of the accepted nodes, from the root's child down."""
    tokens: tuple[int, ...]
    """Token ids of the accepted nodes, then the target's own token: one more than `path` has."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probability of each token, where `TargetSampler.with_logprobs` added them; criteria add none."""


def path_match(tree: TokenTree, target_token: Callable[[int, tuple[int, ...]], int]) -> Match:
    """Walks down the tree as long as some child carries the target's token.

    Args:
        tree: the drafts.
        target_token: the target's token at a node (-1 for the last committed token), given the tokens of the
            path from the root's child down to it. Asked exactly once per visited node: two samples of one
            node, of which the better match is kept, would change the law of the output.
    """
    node = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = target_token(node, tuple(tokens))
        tokens.append(token)
        child = tree.children(node).get(token)
        if child is None:
            return Match(tuple(path), tuple(tokens))
        path.append(child)
        node = child
