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
    children: list[list[int]] = [[] for _ in range(len(chosen) + 1)]
    for index, (_, _, parent) in enumerate(chosen):
        children[parent].append(index)
    order: list[int] = []
    place = [ROOT] * (len(chosen) + 1)  # by index in `chosen`; the last one is the root's
    left = children[ROOT][::-1]
    while left:
        index = left.pop()
        place[index] = len(order)
        order.append(index)
        # The child pushed last comes out first, and that must be the likeliest.
        left.extend(children[index][::-1])
    nodes = [chosen[index] for index in order]
    return TokenTree(
        tuple([node.token for node, _, _ in nodes]),
        tuple([place[parent] for _, _, parent in nodes]),
        tuple([survival for _, survival, _ in nodes]),
        tuple([node.source for node, _, _ in nodes]),
    )
