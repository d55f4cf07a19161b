"""A window that is drawn level by level, for sessions whose criterion needs to know the drafts' distribution.

The shape of a window is fixed before anything is drawn, every level is one pass, and draws go on behind an
end-of-sequence token. So the tokens change neither the shape of a window nor its number of passes;
docs/criteria.md names the one trace that they leave in time. Random numbers are keyed by the window's base,
so no number serves two windows. Knows nothing of models, caches, sockets or clocks.
"""

from collections.abc import Sequence
from itertools import count

from drafter_service.draft_tree import OWN, DraftNode, DraftTree, Growth, Rerooted
from speculative import hashing
from speculative.draft_law import QuantisedLaw
from speculative.drawn_window import DrawnWindow
from speculative.noise import draft_word
from speculative.tree import ROOT
from speculative.window_shape import WindowShape


class DrawnTree(DraftTree):
    """One window below the committed tokens. A commit ends it and begins the next.

    Args:
        token: the last committed token.
        length: number of committed tokens, at least 1.
        prefix_hash: hash over the committed tokens.
        shape: of every window.
        seed: of the session.
        end: nothing is drawn behind this position.
    """

    def __init__(
        self, token: int, length: int, prefix_hash: int, *, shape: WindowShape, seed: int, end: int
    ) -> None:
        most = shape.draws * shape.depth
        growth = Growth(children=shape.draws, floor=0.0, depth=shape.depth)
        super().__init__(token, length, prefix_hash, growth=growth, node_limit=most, end=end)
        self._shape, self._seed = shape, seed
        self._laws: dict[DraftNode, QuantisedLaw] = {}
        """What each node's children are drawn from, where that is known."""
        self._begin()

    def _begin(self) -> None:
        """Begins the window of the present root."""
        self._numbers = count()
        self._levels: list[list[DraftNode]] = []
        self._drawn: list[tuple[DraftNode, DraftNode]] = []
        """Each draw: the node below which it was drawn, and its own node, which repeated draws share."""
        self._waiting: list[DraftNode] = []
        """Nodes of the last level whose children are to be drawn."""
        self.in_flight = 0

    @property
    def depth(self) -> int:
        """Number of levels of this window: fewer than the shape's near the session's end."""
        return max(0, min(self._shape.depth, self.end - self.root.position))

    def frontier(self, most: int) -> list[DraftNode]:
        """All nodes of the last level, whatever `most` says: each level takes one pass."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def draw(self, node: DraftNode, law: QuantisedLaw) -> None:
        """Draws the children of the root or of a node that `frontier` gave."""
        self._laws[node] = law
        if node is self.root and not self.depth:
            return
        if node is self.root or not self._levels or node in self._levels[-1]:
            self._levels.append([])
        draws = self._shape.draws if node is self.root else 1
        node.children = {}
        for token in law.draw(draws, self._word, distinct=self._shape.distinct):
            child = node.children.get(token)
            if child is None:
                prefix_hash = hashing.extend(node.prefix_hash, token)
                child = DraftNode(token, node.position + 1, prefix_hash, 1.0, node)
                node.children[token] = child
                self._levels[-1].append(child)
                if len(self._levels) < self.depth:
                    self._waiting.append(child)
            self._drawn.append((node, child))

    def take_window(self, epoch: int) -> DrawnWindow | None:
        """The window when all of its levels are drawn; each window is returned only once."""
        if self.in_flight or not self._levels or len(self._levels) < self.depth or self._waiting:
            return None
        self.in_flight = len(self._drawn)
        places: dict[DraftNode, int] = {self.root: ROOT}
        for place, (_, node) in enumerate(self._drawn):
            node.sent = True
            places.setdefault(node, place)
        inner = sorted({places[above] for above, _ in self._drawn})
        by_place = {place: node for node, place in places.items()}
        return DrawnWindow(
            OWN,
            epoch,
            self.root.position + 1,
            self.root.prefix_hash,
            tuple(node.token for _, node in self._drawn),
            tuple(places[above] for above, _ in self._drawn),
            (1.0,) * len(self._drawn),
            tuple(self._laws[by_place[place]] for place in inner),
        )

    def commit(self, tokens: Sequence[int]) -> Rerooted:
        """Moves the root along committed tokens, drops the window, and begins the next one.

        Where the law behind the last token is known from the window, the first level is drawn at once.
        """
        before = self.in_flight
        moved = super().commit(tokens)
        law = self._laws.get(self.root)
        self._laws, self.root.children = {}, None
        self._begin()
        if law is not None:
            self.draw(self.root, law)
        return Rerooted(moved.path, 0, max(0, before - len(moved.path)))

    def _word(self) -> int:
        return draft_word(self._seed, self.root.position + 1, next(self._numbers))
