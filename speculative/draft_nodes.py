"""Drafted nodes of a session, and the likeliest of them in order; knows nothing of how they arrived."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from speculative.tree import EMPTY_TREE, ROOT, TokenTree


class PoolNode:
    """A drafted node, without a link to its parent: dropping a node then frees its subtree at once."""

    __slots__ = ("children", "estimates", "given_parent", "hash", "position", "source", "token")

    def __init__(self, token: int, position: int, hash_: int, given_parent: float, source: int) -> None:
        self.token = token
        self.position = position
        self.hash = hash_
        self.given_parent = given_parent
        """Calibrated probability of acceptance given the parent: the largest over the node's sources."""
        self.source = source
        """Index of the source that offered the node first; an accepted token counts for this source."""
        self.estimates: dict[int, float] = {}
        """Each source's own estimate of acceptance given the parent, by source index."""
        self.children: dict[int, PoolNode] = {}
        """Child nodes by token id."""

    def estimated(self, source: int, estimate: float, worth: float) -> None:
        """Records a source's estimate for this node; `worth` is the calibrated probability."""
        self.estimates[source] = max(estimate, self.estimates.get(source, 0.0))
        self.given_parent = max(self.given_parent, worth)


# A node, its survival, and its parent's index among the chosen ones.
_Chosen: TypeAlias = tuple[PoolNode, float, int]


class RankedNodes:
    """Drafted nodes, likeliest first. Survival never rises along a path, so the first n are always a tree."""

    __slots__ = ("_chosen", "survivals")

    def __init__(self, chosen: Sequence[_Chosen]) -> None:
        self._chosen = chosen
        self.survivals = [survival for _, survival, _ in chosen]
        """Survival of each node, descending."""

    def tree(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes.

        Nodes are in depth-first order, the likeliest child first, so the rows of the best path lie together.
        """
        chosen = self._chosen[:count]
        return _depth_first(chosen) if chosen else EMPTY_TREE


NO_NODES = RankedNodes(())


def rank_nodes(root: PoolNode, node_limit: int) -> RankedNodes:
    """Ranks the `node_limit` nodes below `root` of the largest survival."""
    if node_limit <= 0 or not root.children:
        return NO_NODES
    # Ties go to the shallower node, then to the smaller hash: the order of arrival must not matter.
    frontier = [(-n.given_parent, n.position, n.hash, n, ROOT) for n in root.children.values()]
    heapify(frontier)
    chosen: list[_Chosen] = []
    while frontier and len(chosen) < node_limit:
        negative, position, _, node, parent = heappop(frontier)
        index = len(chosen)
        chosen.append((node, -negative, parent))
        for child in node.children.values():
            heappush(frontier, (negative * child.given_parent, position + 1, child.hash, child, index))
    return RankedNodes(chosen)


def _depth_first(chosen: Sequence[_Chosen]) -> TokenTree:
    """The tree of nodes that come likeliest first."""
    # Children by parent, the root's last; the likeliest comes last, as the last one is taken first.
    children: list[list[int]] = [[] for _ in range(len(chosen) + 1)]
    for index in range(len(chosen) - 1, -1, -1):
        children[chosen[index][2]].append(index)
    tokens: list[int] = []
    parents: list[int] = []
    survivals: list[float] = []
    sources: list[int] = []
    place = [ROOT] * (len(chosen) + 1)
    left = children[ROOT]
    while left:
        index = left.pop()
        node, survival, parent = chosen[index]
        place[index] = len(tokens)
        tokens.append(node.token)
        parents.append(place[parent])
        survivals.append(survival)
        sources.append(node.source)
        if below := children[index]:
            left += below
    return TokenTree(tuple(tokens), tuple(parents), tuple(survivals), tuple(sources))
