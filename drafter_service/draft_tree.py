"""One session's draft tree: what was drafted, what was sent, which leaf is worth expanding next.

Every node's survival is the estimated probability that its whole path from the last committed token is
accepted. It never rises along a path, so best-first order is always connected: a chain while the model is
sure, siblings and alternatives as soon as one of them is likelier than the chain's tip. Riding ahead needs no
rule of its own.

Knows nothing of models, logits, cached keys and values, sockets or clocks.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from speculative import hashing
from speculative.draft import MAX_DRAFT_NODES
from speculative.fragment import Fragment
from speculative.policies.policy import DraftLimits, DraftPoint, DraftPolicy, Guess, JudgedPlace
from speculative.survival_curve import SurvivalCurve
from speculative.tree import ROOT

OWN = 1
"""Index of the source's one name, which its fragments bear."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bounds and estimates that decide which nodes a draft tree gets."""

    children: int = 4
    """Most children of one node."""
    scale: float = 0.65
    """Spread of the target's logits around the drafter's, in logits; see `speculative.ranking`."""
    floor: float = 0.01
    """Survival below which a node is neither sent nor expanded."""
    depth: int = 32
    """Longest path from below the last committed token to a leaf, in nodes."""
    cascade: int = 0
    """Most tokens below a leaf that a cheap source guesses, to be computed along with the leaf."""

    @property
    def limits(self) -> DraftLimits:
        """The bounds alone, within which a policy decides."""
        return DraftLimits(self.depth, self.floor, MAX_DRAFT_NODES, self.children)


class DraftNode:
    """A drafted token, or at the root the last committed one."""

    __slots__ = (
        "children",
        "drafted",
        "entropy",
        "held",
        "parent",
        "position",
        "prefix_hash",
        "row",
        "sent",
        "survival",
        "token",
    )

    def __init__(
        self, token: int, position: int, prefix_hash: int, survival: float, parent: "DraftNode | None" = None
    ) -> None:
        self.token = token
        self.position = position  # absolute: the number of ids before it
        self.prefix_hash = prefix_hash  # over all ids up to and including this one
        self.survival = survival
        self.parent = parent
        self.children: dict[int, DraftNode] | None = None  # by token; None: not expanded
        self.row: int | None = None  # where the session's cache has it; None: nowhere yet
        self.sent = False
        self.drafted = survival  # the model's own estimate, given the parent
        self.entropy = 0.0  # of the distribution that the children come from, where the policy reads it
        self.held = False  # whether the policy drafts nothing from that distribution


@dataclass(frozen=True, slots=True)
class Rerooted:
    """The effect of a commit on a draft tree."""

    path: tuple[DraftNode, ...]
    """Drafted nodes that were committed, in order."""
    kept: int
    """Sent nodes that are still possible."""
    dropped: int
    """Sent nodes off the committed path."""


class DraftTree:
    """The tree of nodes drafted below one committed prefix; `commit` moves its root.

    Args:
        token: the last committed token.
        length: number of committed tokens, at least 1.
        prefix_hash: hash over the committed tokens.
        node_limit: most nodes sent and still possible at a time.
        end: positions from here on are not expanded.
        eos_ids: tokens that are drafted but never expanded.
        policy: decides depth, floor and width; None: the bounds of `growth`.
        curve: corrects the model's estimates, and learns from what is committed; None: they stand.
    """

    def __init__(
        self,
        token: int,
        length: int,
        prefix_hash: int,
        *,
        growth: Growth,
        node_limit: int,
        end: int,
        eos_ids: frozenset[int] = frozenset(),
        policy: DraftPolicy | None = None,
        curve: SurvivalCurve | None = None,
    ) -> None:
        self.node_limit = node_limit
        self.end = end
        self.eos_ids = eos_ids
        self.in_flight = 0
        self.policy = DraftPolicy(growth.limits, 0.0) if policy is None else policy
        """Decides depth, floor and width."""
        self.limits = self.policy.limits
        """The policy's bounds since the last commit."""
        self.required = 0.0
        """Survival that the session's verifier asks of nodes for now."""
        self._curve = curve
        self.root = DraftNode(token, length - 1, prefix_hash, 1.0)
        self._unsent: list[DraftNode] = []
        self._leaves: list[tuple[float, int, DraftNode]] = []
        self._serial = count()

    @property
    def least(self) -> float:
        """Survival below which a node is neither sent nor expanded for now."""
        return max(self.required, self.limits.floor)

    @property
    def room(self) -> int:
        """How many further nodes may be under way."""
        return min(self.node_limit, self.limits.nodes) - self.in_flight

    def frontier(self, most: int) -> list[DraftNode]:
        """The likeliest leaves worth expanding, at most `most`; each must be expanded next.

        Empty while as many nodes are in flight as the verifier wants: more could not be sent.
        """
        chosen: list[DraftNode] = []
        if self.room <= 0:
            return chosen
        least = self.least
        while self._leaves and len(chosen) < most and -self._leaves[0][0] >= least:
            chosen.append(heapq.heappop(self._leaves)[2])
        return chosen

    def room_below(self, node: DraftNode) -> int:
        """Number of levels below a node that may be expanded; 0 also where the node ends the text."""
        if node.token in self.eos_ids:
            return 0
        left = self.limits.depth - 1 - (node.position - self.root.position)
        return max(0, min(left, self.end - 1 - node.position))

    def can_expand(self, node: DraftNode) -> bool:
        """Whether a node may be expanded before it was sent: it will be sent, or would not be worth it."""
        will_be_sent = node.survival >= self.least and not self._is_withheld(node)
        return node.children is None and will_be_sent and self._goes_on(node)

    def expand(self, node: DraftNode, children: Sequence[tuple[int, float]], entropy: float = 0.0) -> None:
        """Adds a node's children: tokens, likeliest first, each with its probability given the node.

        Children whose probability alone is below the floor are left out: they could never be sent. Those
        that only the curve puts there stay, unsent: without them the curve would never learn better.

        Args:
            entropy: of the distribution that the children come from, in nats, where the policy reads it.
        """
        node.children = {}
        node.entropy = entropy
        node.held = self.policy.reads_entropy and not self.policy.drafts_after(entropy)
        position = node.position + 1
        depth, floor = position - self.root.position, self.limits.floor
        for token, drafted in children[: self.limits.children]:
            probability = self.policy.estimate(self._corrected(drafted), depth, entropy)
            if probability < floor and (self._curve is None or drafted < floor):
                continue
            child_hash = hashing.extend(node.prefix_hash, token)
            child = DraftNode(token, position, child_hash, node.survival * probability, node)
            child.drafted = drafted
            node.children[token] = child
            self._unsent.append(child)

    def take_unsent(self) -> list[DraftNode]:
        """Nodes to send now, likeliest first; each hangs below the root or a node that was sent before."""
        room, least = self.room, self.least
        if room <= 0:
            return []
        ready = [node for node in self._unsent if node.survival >= least and not self._is_withheld(node)]
        if not ready:
            return ready
        ready.sort(key=lambda node: (-node.survival, node.position, node.token))
        del ready[room:]
        for node in ready:
            node.sent = True
            self._offer_leaf(node)
        self._unsent = [node for node in self._unsent if not node.sent]
        self.in_flight += len(ready)
        return ready

    def trials(self, tokens: Sequence[int]) -> tuple[JudgedPlace, ...]:
        """The places of these tokens for which a node was sent; to be asked once, before their `commit`.

        The curve learns from them.
        """
        node: DraftNode | None = self.root
        found: list[JudgedPlace] = []
        for depth, token in enumerate(tokens, 1):
            if node is None or not node.children:
                break
            guesses = tuple(
                Guess(self._corrected(child.drafted), child.token == token)
                for child in node.children.values()
                if child.sent
            )
            self._teach(node, token)
            if not guesses:
                break
            found.append(JudgedPlace(depth, guesses, node.entropy))
            node = node.children.get(token)
        return tuple(found)

    def commit(self, tokens: Sequence[int]) -> Rerooted:
        """Moves the root along committed tokens; forgets the nodes off that path.

        From now on the policy's present limits hold.
        """
        self.limits = self.policy.limits
        node, path, before = self.root, [], self.in_flight
        for token in tokens:
            child = node.children.get(token) if node.children else None
            if child is None:
                node = self._undrafted_root(tokens)
                break
            path.append(child)
            node = child
        self._reroot(node)
        committed = sum(step.sent for step in path)
        return Rerooted(tuple(path), self.in_flight, before - committed - self.in_flight)

    def clear(self) -> None:
        """Forgets every node below the root, so that the root can be expanded anew."""
        self.root.children = None
        self._reroot(self.root)

    def nodes(self) -> Iterator[DraftNode]:
        """Every node below the root, parents first."""
        level = [self.root]
        while level:
            level = [child for node in level if node.children for child in node.children.values()]
            yield from level

    def _undrafted_root(self, tokens: Sequence[int]) -> DraftNode:
        """A root at the end of tokens of which some were not drafted."""
        prefix_hash = self.root.prefix_hash
        for token in tokens:
            prefix_hash = hashing.extend(prefix_hash, token)
        return DraftNode(tokens[-1], self.root.position + len(tokens), prefix_hash, 1.0)

    def _reroot(self, root: DraftNode) -> None:
        share, self.root = root.survival or 1.0, root
        root.survival, root.parent = 1.0, None
        self._unsent, self._leaves, self.in_flight = [], [], 0
        for node in self.nodes():
            node.survival /= share
            if not node.sent:
                self._unsent.append(node)
                continue
            self.in_flight += 1
            if node.children is None:
                self._offer_leaf(node)

    def _offer_leaf(self, node: DraftNode) -> None:
        if node.children is None and self._goes_on(node):  # else it was expanded before it was sent
            heapq.heappush(self._leaves, (-node.survival, next(self._serial), node))

    def _is_withheld(self, node: DraftNode) -> bool:
        """Whether a node comes from a distribution, not the root's, from which the policy drafts nothing."""
        return node.parent is not None and node.parent is not self.root and node.parent.held

    def _goes_on(self, node: DraftNode) -> bool:
        """Whether the draft may go on below a node."""
        depth = node.position - self.root.position
        if depth >= self.limits.depth or node.position >= self.end or node.token in self.eos_ids:
            return False
        return self.policy.goes_on(DraftPoint(depth, self._corrected(node.drafted), node.survival))

    def _teach(self, node: DraftNode, token: int) -> None:
        """Shows the curve which child came true; those held back teach as well, so they can return."""
        if self._curve is not None and node.children:
            for child in node.children.values():
                self._curve.saw(child.drafted, child.token == token)

    def _corrected(self, drafted: float) -> float:
        """The model's own estimate of a node given its parent, as far as it was right before."""
        return drafted if self._curve is None else self._curve.worth(drafted)


def pack(nodes: Iterable[DraftNode], epoch: int) -> list[Fragment]:
    """Packs new nodes into fragments, the wire's unit of drafts; fragments are in order of their parents.

    Nodes are sent once, as they grow, so every new node hangs below one that the verifier has or will have:
    siblings share a fragment whose base is their parent, named by the number of ids up to it and the hash
    over them.
    """
    families: dict[int, list[DraftNode]] = {}
    for node in nodes:
        families.setdefault(id(node.parent), []).append(node)
    return [
        _fragment(family[start : start + MAX_DRAFT_NODES], epoch)
        for family in families.values()
        for start in range(0, len(family), MAX_DRAFT_NODES)
    ]


def _fragment(family: list[DraftNode], epoch: int) -> Fragment:
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
