"""The draft tree of one round as flat arrays; knows nothing of sessions and sources.

Node i continues node `parents[i]`, or the last committed token where that is -1 (ROOT). A parent precedes its
child, so that one pass in node order sees every parent first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from speculative.errors import MalformedDraft

ROOT = -1
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The tree of drafted tokens that a round verifies; every field has one entry per node.

    Raises:
        MalformedDraft: entries do not line up, a parent does not precede its child, two siblings carry the
            same token, a survival is outside [0, 1] or a source below 1.
    """

    tokens: tuple[int, ...]
    """Token id of each node."""
    parents: tuple[int, ...]
    """Node index of each node's parent; -1 (ROOT) for a node that continues the last committed token."""
    survival: tuple[float, ...]
    """Estimated probability that the whole path from the root to the node is accepted."""
    sources: tuple[int, ...]
    """Index of the source that offered the node first: k is the session's source number k, from 1."""
    _children: dict[int, dict[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not count == len(self.parents) == len(self.survival) == len(self.sources):
            raise MalformedDraft(
                f"a tree of {count} tokens has {len(self.parents)} parents, {len(self.survival)} survivals "
                f"and {len(self.sources)} sources; give one of each per node"
            )
        if not all([0 <= survival <= 1 for survival in self.survival]):
            raise MalformedDraft(f"survival {self.survival} leaves [0, 1]")
        if count and min(self.sources) < 1:
            raise MalformedDraft(f"sources {self.sources} go below 1; 0 is the target itself")
        children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise MalformedDraft(f"node {node} has parent {parent}; a parent precedes its child")
            siblings = children.get(parent)
            if siblings is None:
                children[parent] = {token: node}
            elif siblings.setdefault(token, node) != node:
                raise MalformedDraft(f"node {node} repeats token {token} under parent {parent}")
        object.__setattr__(self, "_children", children)

    @classmethod
    def trusted(
        cls,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        survival: tuple[float, ...],
        sources: tuple[int, ...],
        children: dict[int, dict[int, int]],
    ) -> "TokenTree":
        """A tree that is not checked, from nodes that were when they came; for every step of every session.

        `children` holds the node index by token id of each node's children, by node.
        """
        tree = object.__new__(cls)
        fill = object.__setattr__
        fill(tree, "tokens", tokens)
        fill(tree, "parents", parents)
        fill(tree, "survival", survival)
        fill(tree, "sources", sources)
        fill(tree, "_children", children)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> Mapping[int, int]:
        """Node index by token id of the children of `node` (ROOT for the last committed token)."""
        return self._children.get(node, _NONE)

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`, inclusive; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


EMPTY_TREE = TokenTree((), (), (), ())
