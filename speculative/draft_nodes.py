"""Drafted nodes of a session, and the likeliest of them in order; knows nothing of how they arrived."""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from speculative.tree import EMPTY_TREE, ROOT, TokenTree


class PoolNode:
    """A drafted node, without a reference to its parent: dropping a node then frees its subtree at once."""

    __slots__ = (
        "children",
        "estimates",
        "given_parent",
        "hash",
        "parent_hash",
        "position",
        "source",
        "survival",
        "token",
    )

    def __init__(self, token: int, position: int, hash_: int, parent_hash: int, source: int) -> None:
        self.token = token
        self.position = position
        self.hash = hash_
        self.parent_hash = parent_hash
        """Hash of the parent, by which a ranking finds the parent's place."""
        self.given_parent = 0.0
        """Calibrated probability of acceptance given the parent: the largest over the node's sources."""
        self.survival = 1.0
        """Calibrated probability that the path from the pool's root is accepted, once the pool has set it."""
        self.source = source
        """Index of the source that offered the node first; an accepted token counts for this source."""
        self.estimates: dict[int, float] = {}
        """Each source's own estimate of acceptance given the parent, by source index."""
        self.children: dict[int, PoolNode] = {}
        """Child nodes by token id."""

    def estimated(self, source: int, estimate: float, worth: float) -> bool:
        """Records a source's estimate and its calibrated worth; returns whether `given_parent` rose."""
        self.estimates[source] = max(estimate, self.estimates.get(source, 0.0))
        if worth <= self.given_parent:
            return False
        self.given_parent = worth
        return True


# A node's order in a ranking, and the node. Ties in survival go to the shallower node, then to the smaller
# hash: the order of arrival must not matter.
_Ranked: TypeAlias = tuple[float, int, int, PoolNode]


class RankedNodes:
    """Drafted nodes, likeliest first. Survival never rises along a path, so the first n are always a tree.

    Args:
        root_hash: hash of the node below which all these nodes lie.
        ranked: the nodes in order.
    """

    __slots__ = ("_ranked", "_root_hash", "survivals")

    def __init__(self, root_hash: int, ranked: Sequence[_Ranked]) -> None:
        self._root_hash = root_hash
        self._ranked = ranked
        self.survivals = [entry[3].survival for entry in ranked]
        """Survival of each node, descending."""

    def tree(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes.

        Nodes are in depth-first order, the likeliest child first, so the rows of the best path lie together.
        """
        ranked = self._ranked[:count]
        return _depth_first(self._root_hash, ranked) if ranked else EMPTY_TREE


NO_NODES = RankedNodes(0, ())
_SORTED = 4
"""A pool of up to this many times the node limit is sorted whole, which is faster than a search by heap."""


def rank_nodes(root: PoolNode, nodes: Collection[PoolNode], node_limit: int) -> RankedNodes:
    """Ranks the `node_limit` nodes of the largest survival; `nodes` are all nodes below `root`."""
    if node_limit <= 0 or not nodes:
        return NO_NODES
    if len(nodes) <= _SORTED * node_limit:
        # A child ranks behind its parent, so the first nodes of all are what a search from the root finds.
        ranked = sorted([(-node.survival, node.position, node.hash, node) for node in nodes])
        return RankedNodes(root.hash, ranked[:node_limit])
    frontier = [(-node.survival, node.position, node.hash, node) for node in root.children.values()]
    heapify(frontier)
    found: list[_Ranked] = []
    while frontier and len(found) < node_limit:
        best = heappop(frontier)
        found.append(best)
        for child in best[3].children.values():
            heappush(frontier, (-child.survival, child.position, child.hash, child))
    return RankedNodes(root.hash, found)


def _depth_first(root_hash: int, ranked: Sequence[_Ranked]) -> TokenTree:
    """The tree of nodes that come likeliest first."""
    # Children by the parent's hash; the likeliest comes last, as the last one is taken first.
    below: dict[int, list[PoolNode]] = {}
    for entry in reversed(ranked):
        node = entry[3]
        siblings = below.get(node.parent_hash)
        if siblings is None:
            below[node.parent_hash] = [node]
        else:
            siblings.append(node)
    tokens: list[int] = []
    parents: list[int] = []
    survivals: list[float] = []
    sources: list[int] = []
    children: dict[int, dict[int, int]] = {ROOT: {}}
    place = {root_hash: ROOT}
    left = below[root_hash]
    while left:
        node = left.pop()
        own, parent = len(tokens), place[node.parent_hash]
        tokens.append(node.token)
        parents.append(parent)
        survivals.append(node.survival)
        sources.append(node.source)
        children[parent][node.token] = own
        further = below.get(node.hash)
        if further is not None:
            place[node.hash] = own
            children[own] = {}
            left += further
    return TokenTree.trusted(tuple(tokens), tuple(parents), tuple(survivals), tuple(sources), children)
