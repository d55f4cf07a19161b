"""A window that a source drew from distributions of its own, and what commits leave of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from speculative.acceptance.drawn import Draw
from speculative.draft_law import QuantisedLaw
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment
from speculative.tree import EMPTY_TREE, ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class DrawnWindow(Fragment):
    """A fragment whose every node is one draw; siblings are in the order of drawing.

    A token that was drawn again below its parent is one more node, without children.

    Raises:
        MalformedDraft: as a Fragment; laws that are not one for the base and one for each node with children;
            a token that its law cannot draw; children below a repeated draw; or a depth with more nodes than
            the base has children.
    """

    laws: tuple[QuantisedLaw, ...]
    """What the children of the base were drawn from, then those of each node with children, in node order."""

    def __post_init__(self) -> None:
        Fragment.__post_init__(self)
        inner = self.inner
        if len(self.laws) != len(inner):
            raise MalformedDraft(
                f"a window with children below {len(inner)} places has {len(self.laws)} laws; "
                f"send one for each"
            )
        laws = dict(zip(inner, self.laws, strict=True))
        seen: set[tuple[int, int]] = set()
        depths: list[int] = []
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not laws[parent].has(token):
                raise MalformedDraft(f"window node {node} holds id {token}, to which its q gives no chance")
            if (parent, token) in seen and node in laws:
                raise MalformedDraft(f"window node {node} repeats a draw; it must have no children")
            seen.add((parent, token))
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        widest = max(depths.count(depth) for depth in set(depths))
        if widest > depths.count(1):
            raise MalformedDraft(
                f"a window has {widest} nodes at one depth; its base has {depths.count(1)} children, "
                f"and no depth may have more"
            )

    @property
    def inner(self) -> list[int]:
        """The base as -1, then the nodes that have children, in order."""
        return sorted({ROOT, *self.parents})

    @property
    def repeats(self) -> bool:
        """Whether some token was drawn twice below one parent."""
        return len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens)


class CutWindow(NamedTuple):
    """The upper levels of a window, as a round judges them."""

    tree: TokenTree = EMPTY_TREE
    drawn: Mapping[int, tuple[Draw, ...]] = {}
    """The draws below each node of the tree."""
    depth: int = 0
    """Number of levels."""


class OpenWindow:
    """A window below the last committed token: its repeated draws share nodes, and its root moves.

    Nothing that hangs below the root was looked at, so a round may use it. `cut` takes whole levels: which of
    them must not depend on the drawn tokens.
    """

    def __init__(self, window: DrawnWindow) -> None:
        self.source = window.source
        self.width = window.parents.count(ROOT)
        """Most nodes of one depth."""
        laws = {node: law.law for node, law in zip(window.inner, window.laws, strict=True)}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._children: dict[int, dict[int, int]] = {}
        self._draws: dict[int, list[Draw]] = {}
        self._root, self._root_depth = ROOT, 0
        places: list[int] = []
        for token, parent in zip(window.tokens, window.parents, strict=True):
            above = ROOT if parent == ROOT else places[parent]
            node = self._child(above, token)
            places.append(node)
            self._draws.setdefault(above, []).append(Draw(node, laws[parent]))

    def _child(self, above: int, token: int) -> int:
        siblings = self._children.setdefault(above, {})
        if token not in siblings:
            siblings[token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(above)
            self._depths.append(1 if above == ROOT else self._depths[above] + 1)
        return siblings[token]

    def __len__(self) -> int:
        """Number of nodes, of all levels."""
        return len(self._tokens)

    @property
    def depth(self) -> int:
        """Number of levels below the root's depth; which tokens lead to the root does not change it."""
        return max(self._depths) - self._root_depth

    def known(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, which follow the root, the window holds one below the other."""
        node = self._root
        for count, token in enumerate(tokens):
            found = self._children.get(node, {}).get(token)
            if found is None:
                return count
            node = found
        return len(tokens)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Moves the root along committed tokens; False where nothing of the window is left below them."""
        for token in tokens:
            found = self._children.get(self._root, {}).get(token)
            if found is None:
                return False
            self._root, self._root_depth = found, self._root_depth + 1
        return bool(self._children.get(self._root))

    def cut(self, depth: int, survivals: Sequence[float]) -> CutWindow:
        """The first `depth` levels below the root; `survivals` gives the survival of each level's nodes."""
        places = {self._root: ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        levels: list[int] = []
        for node, (token, above) in enumerate(zip(self._tokens, self._parents, strict=True)):
            level = self._depths[node] - self._root_depth
            if above in places and level <= depth:
                places[node] = len(tokens)
                tokens.append(token)
                parents.append(places[above])
                levels.append(level)
        drawn = {
            place: tuple(Draw(places[child], law) for child, law in self._draws[node])
            for node, place in places.items()
            if node in self._draws and self._draws[node][0].node in places
        }
        chances = tuple(survivals[level - 1] for level in levels)
        tree = TokenTree(tuple(tokens), tuple(parents), chances, (self.source,) * len(tokens))
        return CutWindow(tree, drawn, depth)
