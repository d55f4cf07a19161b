"""Packs newly drafted nodes into fragments, the unit in which a draft tree crosses the wire.

Nodes are sent once, as they grow, so every new node hangs below one that the verifier has or will have:
siblings share a fragment whose base is their parent, named by the number of ids up to it and the hash over
them. Knows nothing of protobuf, nor of how nodes are chosen.
"""

from collections.abc import Iterable

from drafter_service.draft_tree import Node
from speculative.draft import MAX_DRAFT_NODES
from speculative.fragment import Fragment
from speculative.tree import ROOT

OWN = 1
"""The credit index that fragments bear here; the verifier has its own for each source."""


def pack(nodes: Iterable[Node], epoch: int) -> list[Fragment]:
    """New nodes as fragments, in the order in which their parents appear."""
    families: dict[int, list[Node]] = {}
    for node in nodes:
        families.setdefault(id(node.parent), []).append(node)
    return [
        _fragment(family[start : start + MAX_DRAFT_NODES], epoch)
        for family in families.values()
        for start in range(0, len(family), MAX_DRAFT_NODES)
    ]


def _fragment(family: list[Node], epoch: int) -> Fragment:
    parent = family[0].parent
    assert parent is not None, "the root is never sent"
    return Fragment(
        source=OWN,
        epoch=epoch,
        base=parent.position + 1,
        prefix_hash=parent.prefix_hash,
        tokens=tuple(node.token for node in family),
        parents=(ROOT,) * len(family),
        survival=tuple(min(node.survival / parent.survival, 1.0) for node in family),
    )
