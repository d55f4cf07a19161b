"""The continuations that all memories of a session found, as one tree with one estimate for each node.

A node's probability, given its parent, is a mixture over the memories that know the parent: what each says of
the token, weighted by how far it can be trusted (`trust.py`). So memories that agree add up, those that
differ share, and a memory that was wrong in this session gives way. The tree grows best first. What is
committed moves its root and teaches the weights. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from retrieval_service.ranking import DraftShape, Noise, chances
from retrieval_service.trie import CountedTrie
from retrieval_service.trust import Expert, SessionTrust, kind_of
from speculative.tree import ROOT

WITNESS = 0
"""Source index of a memory that is asked for its opinion alone: nodes that only it knows are not drafted."""


class TreeBounds(NamedTuple):
    """What a session's draft may be."""

    nodes: int
    """Most nodes."""
    depth: int
    """Most tokens ahead of the last committed one."""
    vocabulary_size: int
    """Drafted ids are below this."""


class FoundTrie(NamedTuple):
    """What one memory found."""

    memory: str
    trie: CountedTrie


class Sampling(NamedTuple):
    """Where the session's noise comes from."""

    seed: int
    position: int
    """Number of committed ids."""


@dataclass(slots=True, eq=False)
class JointNode:
    """A token that some memories know at this place; at the root the last committed one."""

    token: int = ROOT
    parent: "JointNode | None" = None
    depth: int = 0
    given_parent: float = 1.0
    """Probability of acceptance if the parent is accepted."""
    survival: float = 1.0
    source: int = WITNESS
    """Index of the source that has the largest part in the estimate."""
    places: dict[int, int] = field(default_factory=dict)
    """The node's index in the trie of each source that knows it."""
    children: "dict[int, JointNode]" = field(default_factory=dict)
    experts: list[Expert] = field(default_factory=list)
    """What the memories say of the next token."""


class JointTree:
    """One round's tree of a session.

    Args:
        found: what each memory found, by source index.
        sampling: None: greedy decoding.
    """

    def __init__(
        self,
        found: Mapping[int, FoundTrie],
        trust: SessionTrust,
        sampling: Sampling | None,
        shape: DraftShape,
        bounds: TreeBounds,
    ) -> None:
        self._found, self._trust, self._shape, self._bounds = found, trust, shape, bounds
        self._below = {source: _children(trie, bounds) for source, (_, trie) in found.items()}
        self._noise = None if sampling is None else self._drawn(sampling)
        self._root: JointNode | None = JointNode(places=dict.fromkeys(found, ROOT))
        self.nodes = self._grow(self._root)
        """The nodes to draft, likeliest first; a parent comes before its child."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves the root along committed tokens, and teaches the weights which ones they were."""
        for token in tokens:
            if self._root is None:
                return
            if self._root.experts:
                self._trust.learn(self._root.experts, token)
            self._root = self._root.children.get(token)

    def _grow(self, root: JointNode) -> list[JointNode]:
        waiting = [(-root.survival, 0, root)]
        chosen: list[JointNode] = []
        serial = 0
        while waiting and len(chosen) <= self._bounds.nodes:
            node = heappop(waiting)[2]
            chosen.append(node)
            self._expand(node)
            for child in node.children.values():
                if child.source != WITNESS and child.survival >= self._shape.floor:
                    serial += 1
                    heappush(waiting, (-child.survival, serial, child))
        return chosen[1:]

    def _expand(self, node: JointNode) -> None:
        """Gives a node its experts and children."""
        sources: list[int] = []
        for source, place in node.places.items():
            memory, trie = self._found[source]
            family = self._below[source].get(place)
            if not family:
                continue
            total = trie.occurrences if place == ROOT else trie.counts[place]
            tokens = [trie.tokens[n] for n in family]
            noise = None if self._noise is None else self._noise.at(node.depth, tokens)
            given = chances([trie.counts[n] / total for n in family], total, noise, self._shape)
            kind = kind_of(memory, trie.match_length + node.depth, total)
            node.experts.append(Expert(kind, dict(zip(tokens, given, strict=True))))
            sources.append(source)
            for token, below in zip(tokens, family, strict=True):
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = JointNode(token, node, node.depth + 1)
                child.places[source] = below
        self._estimate(node, sources)

    def _estimate(self, node: JointNode, sources: Sequence[int]) -> None:
        """Sets the probabilities of a node's children; `sources` are those of its experts."""
        weights = self._trust.weights(node.experts)
        for token, child in node.children.items():
            total = most = 0.0
            for source, weight, (_, given) in zip(sources, weights, node.experts, strict=True):
                part = weight * given.get(token, 0.0)
                total += part
                if source != WITNESS and part > most:
                    most, child.source = part, source
            child.given_parent = min(1.0, total)
            child.survival = node.survival * child.given_parent

    def _drawn(self, sampling: Sampling) -> Noise:
        wanted = [
            (depth, self._found[source].trie.tokens[node])
            for source, below in self._below.items()
            for depth, node in _by_depth(below)
        ]
        return Noise(sampling.seed, sampling.position, wanted)


def _children(trie: CountedTrie, bounds: TreeBounds) -> dict[int, list[int]]:
    """Children of each node and of ROOT, without those that may not be drafted, nor what is below them."""
    below: dict[int, list[int]] = {ROOT: []}
    depths = {ROOT: 0}
    for node, (token, parent) in enumerate(zip(trie.tokens, trie.parents, strict=True)):
        above = depths.get(parent)
        if above is None or above >= bounds.depth or token >= bounds.vocabulary_size:
            continue
        depths[node] = above + 1
        below.setdefault(parent, []).append(node)
    return below


def _by_depth(below: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Each node with the depth of its parent."""
    found: list[tuple[int, int]] = []
    level, depth = list(below[ROOT]), 0
    while level:
        found += [(depth, node) for node in level]
        level = [child for node in level for child in below.get(node, ())]
        depth += 1
    return found
