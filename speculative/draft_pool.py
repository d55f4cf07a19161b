"""One draft tree per session out of fragments from many sources; knows nothing of how fragments arrive.

A fragment names the prefix that it continues by length and hash, so it need not come in time or in order:

- its base lies behind what is committed: the fragment is walked forward along the committed ids;
- its base is a drafted node, or one that has been committed since: the fragment grows there;
- its base is not known yet: the fragment is unanchored. It waits, bounded per source, and is tried again as
  nodes and commits arrive;
- its base is off the committed path, or its epoch is older: the fragment is stale, dropped and counted.

Nodes keep the probability of acceptance *given their parent*. So a commit leaves the nodes of a subtree as
they are, and the order in which fragments arrive does not matter.
"""

from array import array
from collections.abc import Sequence, Set
from typing import Final

from speculative.calibration import UNCALIBRATED, Calibrator
from speculative.draft_nodes import Leaf, PoolNode, RankedNodes, best_chain, likely_leaves, rank_nodes
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment, Offer, OfferTotals
from speculative.hashing import extend, prefix_hashes
from speculative.marginal import DraftedPlace
from speculative.tree import ROOT, TokenTree


class UnanchoredFragments:
    """Keeps fragments until the prefix that they continue is drafted or committed.

    Args:
        capacity: largest number of fragments of one source; the oldest is dropped first.
    """

    __slots__ = ("_by_hash", "_by_source", "_capacity")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Dictionaries as ordered sets: a fragment waits once, and the oldest comes first.
        self._by_source: dict[int, dict[Fragment, None]] = {}
        self._by_hash: dict[int, list[Fragment]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_source.values()))

    def __contains__(self, fragment: Fragment) -> bool:
        return fragment in self._by_source.get(fragment.source, ())

    def add(self, fragment: Fragment) -> Fragment | None:
        """Adds a fragment; returns the fragment dropped for it, or None."""
        queue = self._by_source.setdefault(fragment.source, {})
        queue[fragment] = None
        self._by_hash.setdefault(fragment.prefix_hash, []).append(fragment)
        if len(queue) <= self._capacity:
            return None
        oldest = next(iter(queue))
        self._remove(oldest)
        return oldest

    def take(self, prefix_hash: int) -> list[Fragment]:
        """Removes and returns the fragments that wait for the prefix of this hash, the oldest first."""
        found = self._by_hash.get(prefix_hash)
        return self._remove_all(list(found)) if found else []

    def take_up_to(self, length: int) -> list[Fragment]:
        """Removes and returns the fragments that wait for a prefix of at most `length` ids."""
        return self._remove_all([f for queue in self._by_source.values() for f in queue if f.base <= length])

    def _remove_all(self, fragments: list[Fragment]) -> list[Fragment]:
        for fragment in fragments:
            self._remove(fragment)
        return fragments

    def _remove(self, fragment: Fragment) -> None:
        del self._by_source[fragment.source][fragment]
        same_base = self._by_hash[fragment.prefix_hash]
        same_base.remove(fragment)
        if not same_base:
            del self._by_hash[fragment.prefix_hash]


# Place of a fragment's node that is neither drafted nor committed.
_STALE: Final = -1
_REFUSED: Final = -2


class DraftPool:
    """The drafts of one session: fragments in, the best tree out.

    Args:
        ids: all committed ids.
        epoch: epoch of the session; fragments of older epochs are stale.
        vocabulary_size: width of the target's logits; drafted ids are below it.
        limit: largest number of ids that the session may have.
        node_cap: largest number of drafted nodes; one source may hold half, so that it starves no other.
        unanchored_cap: largest number of unanchored fragments of one source; the oldest is dropped first.
        calibrator: calibrates estimates, and learns from every offered node whose parent was committed.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        epoch: int,
        vocabulary_size: int,
        limit: int,
        node_cap: int = 512,
        unanchored_cap: int = 64,
        calibrator: Calibrator = UNCALIBRATED,
    ) -> None:
        self.epoch = epoch
        """Epoch of the session; raised when the session is adopted under a higher one. Drafted nodes stay."""
        self.totals = OfferTotals()
        """Numbers of nodes over the pool's life, by what the pool did with them."""
        self.drafted_by_source: dict[int, int] = {}
        """Number of nodes offered under the current epoch, kept or not, by source index."""
        self._vocabulary_size = vocabulary_size
        # The last id stands at limit - 1, and the row before predicts it: drafting the last id gains nothing.
        self._end = limit - 1
        self._node_cap = node_cap
        self._source_cap = max(1, node_cap // 2)
        self._ids = array("q", ids)
        self._hashes = array("Q", prefix_hashes(ids).tobytes())
        self._calibrator = calibrator
        self._root = PoolNode(ROOT, len(self._ids) - 1, self._hashes[-1], 0)
        self._by_hash: dict[int, PoolNode] = {}
        """All drafted nodes; they lie below the root."""
        self._outdated = False
        """Whether nodes' survivals are to be worked out anew before they are ranked."""
        self._held: dict[int, int] = {}
        self._late: set[tuple[int, int]] = set()
        """Hash and source of the nodes that were drafted since the last ranking."""
        self._late_below: set[tuple[int, int]] = set()
        """Hash of a node, and a source that has drafted children of it since the last ranking only."""
        self._unanchored = UnanchoredFragments(unanchored_cap)
        self._ready: list[Fragment] = []

    @property
    def length(self) -> int:
        """Number of committed ids."""
        return len(self._ids)

    @property
    def drafted(self) -> int:
        """Number of drafted nodes that may enter a tree."""
        return len(self._by_hash)

    @property
    def unanchored(self) -> int:
        """Number of fragments whose base is not known yet."""
        return len(self._unanchored)

    @property
    def is_bare(self) -> bool:
        """Whether nothing is drafted: a round that waits for drafts goes on waiting."""
        return not self._by_hash

    def committed_from(self, position: int) -> Sequence[int]:
        """The committed ids from this position on."""
        return self._ids[position:]

    def hash_at(self, length: int) -> int:
        """The prefix hash of the first `length` committed ids."""
        return self._hashes[length]

    def offer(self, fragment: Fragment) -> Offer:
        """Takes a fragment in; returns the numbers of its nodes by what the pool did with them.

        Raises:
            MalformedDraft: an id outside the vocabulary, or an epoch above the session's.
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

    def drafted_along(self, tokens: Sequence[int]) -> list[DraftedPlace]:
        """What sources had drafted in place of these tokens, which are about to be committed.

        Holds one entry for each token up to the first for which nothing was drafted. Drafts that came after
        the last ranking were too late for the pass that chose the tokens, and are left out.
        """
        found: list[DraftedPlace] = []
        node = self._root
        for token in tokens:
            drafted = _without(self._late_below, node.hash, node.drafters)
            if not drafted:
                break
            child = node.children.get(token)
            right = () if child is None else _without(self._late, child.hash, child.sources)
            found.append(DraftedPlace(drafted, right))
            if child is None:
                break
            node = child
        return found

    def commit(self, tokens: Sequence[int]) -> int:
        """Moves the root along newly committed ids; returns the number of nodes dropped off the path.

        Dropped are drafted nodes off the path and nodes of unanchored fragments that turn out stale.
        """
        stale_before = self.totals.stale
        self._none_is_late()
        path, before = self._path(tokens), self._root
        for depth, token in enumerate(tokens):
            root = self._root
            if root.children:
                self._calibrator.followed(root.children, token)
            if depth < len(path):
                self._root = path[depth]
            else:
                self._root = PoolNode(token, len(self._ids), extend(root.hash, token), root.hash)
            self._ids.append(token)
            self._hashes.append(self._root.hash)
        outrun = self._forget(before, path) if len(path) == len(tokens) else self._forget_all(path)
        self.totals.outrun += outrun
        self._ready.extend(self._unanchored.take_up_to(self.length))
        while self._ready:
            self._place(self._ready.pop())
        return outrun + self.totals.stale - stale_before

    def _path(self, tokens: Sequence[int]) -> list[PoolNode]:
        """Drafted nodes that carry the first of these tokens, from the root's child down."""
        path: list[PoolNode] = []
        children = self._root.children
        for token in tokens:
            node = children.get(token)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def rank(self, node_limit: int) -> RankedNodes:
        """The `node_limit` nodes of the largest survival, likeliest first; the first n are always a tree."""
        self._none_is_late()
        if self._outdated:
            self._work_out_survivals()
        return rank_nodes(self._root, self._by_hash.values(), node_limit)

    def rank_chain(self, node_limit: int) -> RankedNodes:
        """The first `node_limit` nodes of the chain that promises the most tokens, from the root down."""
        self._none_is_late()
        if self._outdated:
            self._work_out_survivals()
        return best_chain(self._root, node_limit)

    def leaves(self, most: int, least: float, without: Set[int]) -> list[Leaf]:
        """The `most` likeliest leaves of at least `least` survival that none of these sources had drafted."""
        if self._outdated:
            self._work_out_survivals()
        return likely_leaves(self._root, most, least, without)

    def best_tree(self, node_limit: int) -> TokenTree:
        """The tree of the `node_limit` nodes of the largest survival."""
        return self.rank(node_limit).tree(node_limit)

    def _none_is_late(self) -> None:
        self._late.clear()
        self._late_below.clear()

    def _work_out_survivals(self) -> None:
        self._root.survival, self._outdated = 1.0, False
        left = [self._root]
        for node in left:
            for child in node.children.values():
                child.survival = node.survival * child.given_parent
                left.append(child)

    def _place(self, fragment: Fragment) -> Offer:
        base = self._find_base(fragment)
        if base is not None:
            offer = self._graft(fragment, base)
        elif fragment.base <= self.length:
            offer = Offer(stale=len(fragment))
        elif fragment.base >= self._end:
            offer = Offer(refused=len(fragment))
        elif fragment in self._unanchored:
            offer = Offer(duplicate=len(fragment))
        else:
            pushed_out = self._unanchored.add(fragment)
            self.totals.refused += len(pushed_out) if pushed_out is not None else 0
            offer = Offer(unanchored=len(fragment))
        self.totals.add(offer)
        return offer

    def _find_base(self, fragment: Fragment) -> PoolNode | int | None:
        """The fragment's base: a node, a committed length behind the root, or None where it is not known."""
        if fragment.base <= self.length:
            if self._hashes[fragment.base] != fragment.prefix_hash:
                return None
            return self._root if fragment.base == self.length else fragment.base
        node = self._by_hash.get(fragment.prefix_hash)
        return node if node is not None and node.position + 1 == fragment.base else None

    def _graft(self, fragment: Fragment, base: PoolNode | int) -> Offer:
        """Adds the fragment's nodes below `base`.

        The place of a node is a node of the pool, the length of the committed prefix that it completes, or
        _STALE or _REFUSED; descendants of a stale or refused node share its fate.
        """
        kept = stale = refused = duplicate = drafted = 0
        places: list[PoolNode | int] = []
        survivals = fragment.survival
        for token, parent, survival in zip(fragment.tokens, fragment.parents, survivals, strict=True):
            above = base if parent == ROOT else places[parent]
            estimate = survival if parent == ROOT else _share(survival, survivals[parent])
            if isinstance(above, int):
                place = self._walk(above, token)
                if above >= 0:
                    self._calibrator.saw(fragment.source, estimate, place != _STALE)
                stale += place == _STALE
                refused += place == _REFUSED
                duplicate += place not in (_STALE, _REFUSED)
            else:
                known = above.children.get(token)
                if known is not None:
                    self._estimated(known, above, fragment.source, estimate)
                    place = known
                    drafted += 1
                else:
                    place = self._grow(above, token, estimate, fragment.source)
                    kept += place != _REFUSED
                    refused += place == _REFUSED
            places.append(place)
        if not kept + drafted + refused:
            return Offer(stale=len(fragment))
        return Offer(kept=kept, stale=stale, duplicate=duplicate + drafted, refused=refused)

    def _walk(self, above: int, token: int) -> PoolNode | int:
        """The place of a node below a committed prefix of `above` ids, or below a stale or refused node."""
        if above < 0:
            return above
        if self._ids[above] != token:
            return _STALE
        return self._root if above + 1 == self.length else above + 1

    def _grow(self, above: PoolNode, token: int, estimate: float, source: int) -> PoolNode | int:
        position = above.position + 1
        held = self._held.get(source, 0)
        if position >= self._end or held >= self._source_cap or len(self._by_hash) >= self._node_cap:
            return _REFUSED
        hash_ = extend(above.hash, token)
        # Two paths with one hash are no accident; the node that has the hash already keeps it.
        if hash_ in self._by_hash:
            return _REFUSED
        node = PoolNode(token, position, hash_, above.hash)
        self._estimated(node, above, source, estimate)
        above.children[token] = self._by_hash[hash_] = node
        self._held[source] = held + 1
        self._ready.extend(self._unanchored.take(hash_))
        return node

    def _estimated(self, node: PoolNode, above: PoolNode, source: int, estimate: float) -> None:
        if source not in node.estimates:
            self._late.add((node.hash, source))
            if source not in above.drafters:
                above.drafters += (source,)
                self._late_below.add((above.hash, source))
        if node.estimated(source, estimate, self._calibrator.worth(source, estimate)) and node.children:
            self._outdated = True
        node.survival = above.survival * node.given_parent

    def _forget(self, root: PoolNode, path: list[PoolNode]) -> int:
        """Forgets the nodes of the path below `root`, and the nodes off the path; returns the latter's
        number."""
        by_hash, held = self._by_hash, self._held
        left: list[PoolNode] = []
        for above, node in zip((root, *path), path, strict=False):
            del by_hash[node.hash]
            held[node.sources[0]] -= 1
            left += [other for other in above.children.values() if other is not node]
        for node in left:
            del by_hash[node.hash]
            held[node.sources[0]] -= 1
            if node.children:
                left.extend(node.children.values())
        self._outdated = True
        return len(left)

    def _forget_all(self, path: list[PoolNode]) -> int:
        """Forgets every node, since the committed tokens left the drafts; returns the number off the path."""
        outrun = len(self._by_hash) - len(path)
        self._by_hash.clear()
        self._held.clear()
        self._outdated = False
        return outrun


def _without(late: set[tuple[int, int]], hash_: int, sources: tuple[int, ...]) -> tuple[int, ...]:
    """The sources that are not late at the node of this hash."""
    return tuple([source for source in sources if (hash_, source) not in late]) if late else sources


def _share(survival: float, above: float) -> float:
    """Survival of a node given its parent, from the survivals of both given the base.

    The result is at most 1. Two survivals that were rounded to 0 count as equal, as two rounded to 1/255 do.
    """
    return survival / above if survival < above else 1.0
