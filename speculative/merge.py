"""One draft tree per session out of fragments from many sources; knows nothing of how they arrive.

A fragment says which prefix it continues by length and hash, so it need not come in time or in order:

- its base lies behind what is committed: it is walked forward along the committed ids;
- its base is a drafted node (or one that has been committed since): it grows there;
- its base is not known yet: it waits, bounded per source, and is tried again as nodes and commits arrive;
- its base is off the committed path, or its epoch is older: it is stale, dropped and counted.

Nodes keep the probability of being accepted *given their parent*, so a commit leaves those of a subtree as
they are, and the order in which fragments arrive does not matter.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from speculative.calibration import TRUSTING, Judge
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment, Offer, Totals
from speculative.hashing import extend, prefix_hashes
from speculative.pending import Node, Ranking, rank
from speculative.tree import ROOT, TokenTree
from speculative.waiting import WaitingRoom

# Where a node of a fragment went that is neither pending nor committed.
_STALE: Final = -1
_REFUSED: Final = -2


class DraftPool:
    """The drafts of one session: fragments in, the best tree out.

    Args:
        ids: all committed ids.
        epoch: the session's; fragments of older ones are stale.
        vocabulary_size: width of the target's logits; ids drafted are below it.
        limit: the most ids in all.
        node_cap: the most pending nodes; one source may hold half of them, so that none starves the others.
        waiting_cap: the most waiting fragments of one source; the oldest goes first.
        judge: what estimates are worth; it hears of every offered node whose parent was committed.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        epoch: int,
        vocabulary_size: int,
        limit: int,
        node_cap: int = 512,
        waiting_cap: int = 64,
        judge: Judge = TRUSTING,
    ) -> None:
        self.epoch = epoch
        """May be raised when the session is adopted under a higher one; what is pending stays."""
        self.totals = Totals()
        self.drafted_by_source: dict[int, int] = {}
        """Nodes offered under the current epoch, by credit index, whatever became of them."""
        self._vocabulary_size = vocabulary_size
        # The last id stands at limit - 1, and the row before predicts it: a draft of it gains nothing.
        self._end = limit - 1
        self._node_cap = node_cap
        self._source_cap = max(1, node_cap // 2)
        self._ids = array("q", ids)
        self._hashes = array("Q", prefix_hashes(ids).tobytes())
        self._judge = judge
        self._root = Node(ROOT, len(self._ids) - 1, self._hashes[-1], 1.0, 0)
        self._by_hash: dict[int, Node] = {}
        self._held: dict[int, int] = {}
        self._room = WaitingRoom(waiting_cap)
        self._ready: list[Fragment] = []

    @property
    def length(self) -> int:
        """Number of committed ids."""
        return len(self._ids)

    @property
    def pending(self) -> int:
        """Nodes that a tree could be made of."""
        return len(self._by_hash)

    @property
    def waiting(self) -> int:
        """Fragments whose base is not known yet."""
        return len(self._room)

    def hash_at(self, length: int) -> int:
        """The prefix hash of the first `length` committed ids."""
        return self._hashes[length]

    def offer(self, fragment: Fragment) -> Offer:
        """Takes a fragment in and says what became of its nodes.

        Raises:
            MalformedDraft: an id outside the vocabulary, or an epoch that does not exist yet.
        """
        count = len(fragment)
        if fragment.epoch < self.epoch:
            self.totals.stale += count
            return Offer(stale=count)
        if fragment.epoch > self.epoch:
            raise MalformedDraft(f"a draft's epoch {fragment.epoch} is above the session's {self.epoch}")
        if max(fragment.tokens) >= self._vocabulary_size:
            raise MalformedDraft(
                f"a draft holds id {max(fragment.tokens)}; ids are below {self._vocabulary_size}"
            )
        self.drafted_by_source[fragment.source] = self.drafted_by_source.get(fragment.source, 0) + count
        offer = self._place(fragment)
        while self._ready:
            self._place(self._ready.pop())
        return offer

    def commit(self, tokens: Sequence[int]) -> int:
        """Moves the root along newly committed ids; returns how many nodes that left off the path.

        These are pending ones, and those of waiting fragments that turned out stale.
        """
        stale_before = self.totals.stale
        outrun = 0
        for token in tokens:
            self._judge_children(token)
            child = self._root.children.pop(token, None)
            for other in self._root.children.values():
                outrun += self._forget_subtree(other)
            if child is None:
                hash_ = extend(self._root.hash, token)
                self._root = Node(token, len(self._ids), hash_, 1.0, 0)
            else:
                del self._by_hash[child.hash]
                self._held[child.source] -= 1
                self._root = child
            self._ids.append(token)
            self._hashes.append(self._root.hash)
        self.totals.outrun += outrun
        self._ready.extend(self._room.take_up_to(self.length))
        while self._ready:
            self._place(self._ready.pop())
        return outrun + self.totals.stale - stale_before

    def rank(self, node_limit: int) -> Ranking:
        """The `node_limit` nodes of the largest survival, likeliest first; every beginning is connected."""
        return rank(self._root, node_limit)

    def best_tree(self, node_limit: int) -> TokenTree:
        """The tree of these nodes."""
        return self.rank(node_limit).tree(node_limit)

    def _judge_children(self, token: int) -> None:
        saw = self._judge.saw
        for child in self._root.children.values():
            hit = child.token == token
            for source, estimate in child.estimates.items():
                saw(source, estimate, hit)

    def _place(self, fragment: Fragment) -> Offer:
        base = self._find_base(fragment)
        if base is not None:
            offer = self._graft(fragment, base)
        elif fragment.base <= self.length:
            offer = Offer(stale=len(fragment))
        elif fragment.base >= self._end:
            offer = Offer(refused=len(fragment))
        elif fragment in self._room:
            offer = Offer(duplicate=len(fragment))
        else:
            pushed_out = self._room.add(fragment)
            self.totals.refused += len(pushed_out) if pushed_out is not None else 0
            offer = Offer(waiting=len(fragment))
        self.totals.add(offer)
        return offer

    def _find_base(self, fragment: Fragment) -> Node | int | None:
        """What the fragment continues: a node, a committed length behind the root, or nothing known."""
        if fragment.base <= self.length:
            if self._hashes[fragment.base] != fragment.prefix_hash:
                return None
            return self._root if fragment.base == self.length else fragment.base
        node = self._by_hash.get(fragment.prefix_hash)
        return node if node is not None and node.position + 1 == fragment.base else None

    def _graft(self, fragment: Fragment, base: Node | int) -> Offer:
        """Adds the fragment's nodes below `base`.

        Each node's place is a pending node, the length of a committed prefix that it completes, or why it has
        none; what hangs below it shares that.
        """
        kept = stale = refused = duplicate = pending = 0
        places: list[Node | int] = []
        survivals = fragment.survival
        for token, parent, survival in zip(fragment.tokens, fragment.parents, survivals, strict=True):
            above = base if parent == ROOT else places[parent]
            estimate = survival if parent == ROOT else _share(survival, survivals[parent])
            if isinstance(above, int):
                place = self._walk(above, token)
                if above >= 0:
                    self._judge.saw(fragment.source, estimate, place != _STALE)
                stale += place == _STALE
                refused += place == _REFUSED
                duplicate += place not in (_STALE, _REFUSED)
            else:
                known = above.children.get(token)
                if known is not None:
                    known.estimated(fragment.source, estimate, self._judge.worth(fragment.source, estimate))
                    place = known
                    pending += 1
                else:
                    place = self._grow(above, token, estimate, fragment.source)
                    kept += place != _REFUSED
                    refused += place == _REFUSED
            places.append(place)
        if not kept + pending + refused:
            return Offer(stale=len(fragment))
        return Offer(kept=kept, stale=stale, duplicate=duplicate + pending, refused=refused)

    def _walk(self, above: int, token: int) -> Node | int:
        """The place of a node below a committed prefix of `above` ids, or below a node that has no place."""
        if above < 0:
            return above
        if self._ids[above] != token:
            return _STALE
        return self._root if above + 1 == self.length else above + 1

    def _grow(self, above: Node, token: int, estimate: float, source: int) -> Node | int:
        position = above.position + 1
        held = self._held.get(source, 0)
        if position >= self._end or held >= self._source_cap or len(self._by_hash) >= self._node_cap:
            return _REFUSED
        hash_ = extend(above.hash, token)
        # Two paths of one hash are no accident; a name that is taken stays with whoever has it.
        if hash_ in self._by_hash:
            return _REFUSED
        node = Node(token, position, hash_, 0.0, source)
        node.estimated(source, estimate, self._judge.worth(source, estimate))
        above.children[token] = self._by_hash[hash_] = node
        self._held[source] = held + 1
        self._ready.extend(self._room.take(hash_))
        return node

    def _forget_subtree(self, top: Node) -> int:
        """Forgets a node and all below it; returns how many."""
        by_hash, held, left = self._by_hash, self._held, [top]
        for node in left:
            del by_hash[node.hash]
            held[node.source] -= 1
            left.extend(node.children.values())
        return len(left)


def _share(survival: float, above: float) -> float:
    """Survival of a node given its parent, from both given the base.

    It never exceeds 1, and two that were rounded to 0 count as alike, as two that were rounded to 1/255 do.
    """
    return survival / above if survival < above else 1.0
