"""Drafted nodes of a session, and the likeliest of them in order; knows nothing of how they arrived."""

from collections.abc import Collection, Sequence, Set
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from speculative.tree import EMPTY_TREE, ROOT, TokenTree


class PoolNode:
    """A drafted node, without a reference to its parent: dropping a node then frees its subtree at once."""

    __slots__ = (
        "children",
        "drafters",
        "estimates",
        "given_parent",
        "hash",
        "parent_hash",
        "position",
        "sources",
        "survival",
        "token",
    )

    def __init__(self, token: int, position: int, hash_: int, parent_hash: int) -> None:
        self.token = token
        self.position = position
        self.hash = hash_
        self.parent_hash = parent_hash
        """Hash of the parent, by which a ranking finds the parent's place."""
        self.given_parent = 0.0
        """Calibrated probability of acceptance given the parent: the largest over the node's sources."""
        self.survival = 1.0
        """Calibrated probability that the path from the pool's root is accepted, once the pool has set it."""
        self.sources: tuple[int, ...] = ()
        """Source indices in the order of their offers; an accepted token counts for the first one."""
        self.estimates: dict[int, float] = {}
        """Each source's own estimate of acceptance given the parent, by source index."""
        self.children: dict[int, PoolNode] = {}
        """Child nodes by token id."""
        self.drafters: tuple[int, ...] = ()
        """Source indices of the sources that have drafted any child, in the order of their first offers."""

    def estimated(self, source: int, estimate: float, worth: float) -> bool:
        """Records a source's estimate and its calibrated worth; returns whether `given_parent` rose."""
        if source in self.estimates:
            self.estimates[source] = max(estimate, self.estimates[source])
        else:
            self.estimates[source] = estimate
            self.sources += (source,)
        if worth <= self.given_parent:
            return False
        self.given_parent = worth
        return True


class RankedNodes:
    """Drafted nodes, likeliest first. Survival never rises along a path, so the first n are always a tree.

    Args:
        root_hash: hash of the node below which all these nodes lie.
        nodes: the nodes in order.
    """

    __slots__ = ("_nodes", "_root_hash", "survivals")

    def __init__(self, root_hash: int, nodes: Sequence[PoolNode]) -> None:
        self._root_hash = root_hash
        self._nodes = nodes
        self.survivals = [node.survival for node in nodes]
        """Survival of each node, descending."""

    def tree(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes.

        Nodes are in depth-first order, the likeliest child first, so the rows of the best path lie together.
        """
        nodes = self._nodes[:count]
        return _tree_of(self._root_hash, nodes) if nodes else EMPTY_TREE

    def sources(self, count: int) -> dict[tuple[int, ...], int]:
        """The number of nodes among the first `count` by their source indices, in the order of the offers."""
        found: dict[tuple[int, ...], int] = {}
        for node in self._nodes[:count]:
            found[node.sources] = found.get(node.sources, 0) + 1
        return found


NO_NODES = RankedNodes(0, ())
_SORTED = 4
"""A pool of up to this many times the node limit is sorted whole, which is faster than a search by heap."""


def rank_nodes(root: PoolNode, nodes: Collection[PoolNode], node_limit: int) -> RankedNodes:
    """Ranks the `node_limit` nodes of the largest survival; `nodes` are all nodes below `root`."""
    if node_limit <= 0 or not nodes:
        return NO_NODES
    # Ties in survival go to the shallower node, then to the smaller hash, whatever came first.
    if len(nodes) <= _SORTED * node_limit:
        # A child ranks behind its parent, so the first nodes of all are what a search from the root finds.
        ranked = sorted([(-node.survival, node.position, node.hash, node) for node in nodes])
        return RankedNodes(root.hash, [entry[3] for entry in ranked[:node_limit]])
    frontier = [(-node.survival, node.position, node.hash, node) for node in root.children.values()]
    heapify(frontier)
    found: list[PoolNode] = []
    while frontier and len(found) < node_limit:
        best = heappop(frontier)[3]
        found.append(best)
        for child in best.children.values():
            heappush(frontier, (-child.survival, child.position, child.hash, child))
    return RankedNodes(root.hash, found)


def best_chain(root: PoolNode, node_limit: int) -> RankedNodes:
    """The chain below `root`, of up to `node_limit` nodes, whose survivals sum to the most.

    The sum is the number of tokens expected of the chain. Ties go to the smaller hash, whatever came first.
    """
    if node_limit <= 0 or not root.children:
        return NO_NODES
    # Nodes by depth; a deeper node's best continuation is known before its parent's.
    levels = [list(root.children.values())]
    while len(levels) < node_limit and (
        below := [one for node in levels[-1] for one in node.children.values()]
    ):
        levels.append(below)
    worth: dict[int, float] = {}
    onward: dict[int, PoolNode] = {}
    for level in reversed(levels):
        for node in level:
            known = [child for child in node.children.values() if child.hash in worth]
            best = min(known, key=lambda child: (-worth[child.hash], child.hash), default=None)
            worth[node.hash] = node.survival
            if best is not None:
                onward[node.hash] = best
                worth[node.hash] += worth[best.hash]
    node = min(levels[0], key=lambda child: (-worth[child.hash], child.hash))
    found = [node]
    while (after := onward.get(node.hash)) is not None:
        found.append(after)
        node = after
    return RankedNodes(root.hash, found)


class Leaf(NamedTuple):
    """A drafted node without children."""

    survival: float
    path: tuple[int, ...]
    """Tokens from the child of the root down to the leaf."""
    hash: int
    """Hash of the prefix that the leaf completes."""


def likely_leaves(root: PoolNode, most: int, least: float, without: Set[int]) -> list[Leaf]:
    """The `most` leaves of the largest survival, at least `least`, that none of these sources had drafted."""
    found: list[Leaf] = []
    left: list[tuple[PoolNode, tuple[int, ...]]] = [
        (node, (node.token,)) for node in root.children.values() if node.survival >= least
    ]
    while left:
        node, path = left.pop()
        if not node.children:
            if without.isdisjoint(node.estimates):
                found.append(Leaf(node.survival, path, node.hash))
            continue
        for child in node.children.values():
            if child.survival >= least:
                left.append((child, (*path, child.token)))
    found.sort(key=lambda leaf: (-leaf.survival, leaf.hash))
    return found[:most]


def _tree_of(root_hash: int, ranked: Sequence[PoolNode]) -> TokenTree:
    """The tree of these nodes, which come likeliest first, in depth-first order."""
    # Children by the parent's hash; the likeliest comes last, as the last one is taken first.
    below: dict[int, list[PoolNode]] = {}
    for node in reversed(ranked):
        above = node.parent_hash
        if above in below:
            below[above].append(node)
        else:
            below[above] = [node]
    ordered: list[PoolNode] = []
    parents: list[int] = []
    children: dict[int, dict[int, int]] = {ROOT: {}}
    left = below.pop(root_hash)
    parents_left = [ROOT] * len(left)
    while left:
        node, parent = left.pop(), parents_left.pop()
        own = len(ordered)
        ordered.append(node)
        parents.append(parent)
        children[parent][node.token] = own
        if node.hash in below:
            under = below[node.hash]
            left += under
            parents_left += [own] * len(under)
            children[own] = {}
    return TokenTree.trusted(
        tuple([node.token for node in ordered]),
        tuple(parents),
        tuple([node.survival for node in ordered]),
        tuple([node.sources[0] for node in ordered]),
        children,
    )
