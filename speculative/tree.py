"""The draft tree of one round as flat arrays; knows nothing of where its nodes came from or go to.

Node i continues node `parents[i]`, or, where that is -1 (ROOT), the last committed token. A parent precedes
its child, so that one pass in node order sees every parent first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from speculative.errors import MalformedDraft

ROOT = -1
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A draft tree of n nodes; every field has one entry per node.

    Raises:
        MalformedDraft: entries do not line up, a parent does not precede its child, two siblings carry the
            same token, a survival is outside [0, 1] or a source below 1.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    survival: tuple[float, ...]
    """Estimated probability that the whole path from the root to this node is accepted."""
    sources: tuple[int, ...]
    """Credit index of the source that offered the node: k names the session's source k - 1."""
    _children: dict[int, dict[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not count == len(self.parents) == len(self.survival) == len(self.sources):
            raise MalformedDraft(
                f"a tree of {count} tokens has {len(self.parents)} parents, {len(self.survival)} survivals "
                f"and {len(self.sources)} sources; give one of each per node"
            )
        if not all(0 <= survival <= 1 for survival in self.survival):
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

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> Mapping[int, int]:
        """Token to node index of the nodes below `node` (ROOT for the last committed token)."""
        return self._children.get(node, _NONE)

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`, inclusive; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


EMPTY_TREE = TokenTree((), (), (), ())
