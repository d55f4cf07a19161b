"""The drafts of a session whose criterion needs q: one window that a source drew, point masses behind it.

The rules that need q keep the target's law only if nothing that happens to a draw depends on the draw. So:

- a window comes whole, from one source at a time, and the rounds' budget takes whole levels of it, by what
  levels brought in earlier rounds and never by tokens or their probabilities;
- a window whose base lies behind what is committed is walked forward: what hangs below the committed tokens
  was never looked at. A round that used a window leaves of it at most levels that the round did not see;
- of each base one window is taken, and bases only rise: a second copy would bring back draws that a round has
  seen;
- all other drafts are point masses. They stand behind the drawn children, where they are accepted only if the
  target's own choice falls on them, so any may come, be merged and be cut as in every other session.
"""

from collections.abc import Sequence
from itertools import zip_longest

from speculative.draft_nodes import RankedNodes
from speculative.draft_pool import DraftPool
from speculative.drawn_window import CutWindow, DrawnWindow, OpenWindow
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment, Offer
from speculative.marginal import DraftedPlace
from speculative.tree import ROOT, TokenTree

_PRIOR = 0.7
"""Chance of a level, given the one above, before anything is known."""
_WEIGHT = 0.1
"""Weight of one round in a level's running mean."""
_FORGET = 0.02
"""Part of the way back to the prior in a round that judged no window, so that windows are tried again."""
_SILENT_ROUNDS = 8
"""Rounds without a window after which another source's windows are taken."""
_NOTHING = DraftedPlace((), ())


class LevelRates:
    """How often rounds get past each level of a window, given that they reached it."""

    def __init__(self) -> None:
        self._rates: list[float] = []

    def survivals(self, depth: int) -> list[float]:
        """The chance that a round reaches each of the first `depth` levels, descending."""
        found, survival = [], 1.0
        for level in range(depth):
            survival *= self._rates[level] if level < len(self._rates) else _PRIOR
            found.append(survival)
        return found

    def judged(self, depth: int, reached: int) -> None:
        """Learns from a round that judged `depth` levels and accepted `reached` of them."""
        if not depth:
            self._rates = [rate + _FORGET * (_PRIOR - rate) for rate in self._rates]
        for level in range(min(depth, reached + 1)):
            if level == len(self._rates):
                self._rates.append(_PRIOR)
            self._rates[level] += _WEIGHT * ((level < reached) - self._rates[level])


class WindowRanking:
    """The levels of a window and the point masses behind it, by what they are worth.

    `survivals` has one entry for each node that a round could verify, descending. A level has as many entries
    as the window may have nodes at a depth, whichever tokens were drawn.

    Args:
        window: the window; its root does not move while the ranking is in use.
        levels: survival of each level.
        points: the point masses.
        node_limit: most entries.
    """

    def __init__(
        self, window: OpenWindow, levels: Sequence[float], points: RankedNodes, node_limit: int
    ) -> None:
        self._window, self._levels, self._points = window, levels, points
        drawn = [(-level / window.width, False) for level in levels for _ in range(window.width)]
        behind = [(-survival, True) for survival in points.survivals]
        ranked = sorted([*drawn, *behind])[:node_limit]
        self.survivals = [-worth for worth, _ in ranked]
        """What each entry adds to the tokens of a round, on average."""
        self._behind = [is_point for _, is_point in ranked]

    def cut(self, count: int) -> CutWindow:
        """The whole levels of the window among the first `count` entries."""
        depth = self._behind[:count].count(False) // self._window.width
        return self._window.cut(depth, self._levels)

    def tree(self, count: int) -> TokenTree:
        """The tree of the first `count` entries: the window's nodes, then the point masses."""
        return with_points(self.cut(count).tree, self._points.tree(self._behind[:count].count(True)))

    def sources(self, count: int) -> dict[tuple[int, ...], int]:
        """The number of nodes among the first `count` entries by their source indices."""
        found = self._points.sources(self._behind[:count].count(True))
        for source in self.cut(count).tree.sources:
            found[source,] = found.get((source,), 0) + 1
        return found


class WindowPool:
    """The drafts of one session: a window, and a pool of point masses.

    Args:
        points: the pool of point masses, which knows the committed ids.
        vocabulary_size: width of the target's logits.
        limit: largest number of ids that the session may have.
        distinct: whether the criterion needs siblings without repetition.
    """

    def __init__(self, points: DraftPool, *, vocabulary_size: int, limit: int, distinct: bool) -> None:
        self._points = points
        self._vocabulary_size = vocabulary_size
        self._end = limit - 1
        self._distinct = distinct
        self._window: OpenWindow | None = None
        self._base = -1
        """Base of the last window that was taken."""
        self._owner = 0
        """Source index of that window."""
        self._silent = 0
        """Rounds since that window."""
        self._ranked = False
        """Whether the window was there when the nodes of this round were ranked."""
        self._judged = 0
        """Levels of the window that this round judges."""
        self._rates = LevelRates()

    @property
    def drafted(self) -> int:
        """Number of drafted nodes, point masses included."""
        return self._points.drafted + (0 if self._window is None else len(self._window))

    @property
    def is_bare(self) -> bool:
        """Whether there is no window: a round that waits for one goes on waiting."""
        return self._window is None

    @property
    def drafted_by_source(self) -> dict[int, int]:
        """Number of nodes offered, kept or not, by source index."""
        return self._points.drafted_by_source

    def hash_at(self, length: int) -> int:
        """The prefix hash of the first `length` committed ids."""
        return self._points.hash_at(length)

    def offer(self, fragment: Fragment) -> Offer:
        """Takes a window or point masses in; returns the numbers of nodes by what became of them.

        Raises:
            MalformedDraft: as `DraftPool.offer`; a law with an id outside the vocabulary; a repeated draw
                where siblings are to be distinct.
        """
        if not isinstance(fragment, DrawnWindow):
            return self._points.offer(fragment)
        largest = max(int(law.ids[-1]) for law in fragment.laws)
        if largest >= self._vocabulary_size:
            raise MalformedDraft(f"q holds id {largest}; ids are below {self._vocabulary_size}")
        if self._distinct and fragment.repeats:
            raise MalformedDraft("a window repeats a draw; the criterion needs siblings without repetition")
        if fragment.epoch > self._points.epoch:
            raise MalformedDraft(
                f"a draft's epoch {fragment.epoch} is above the session's {self._points.epoch}"
            )
        offered = self._points.drafted_by_source
        offered[fragment.source] = offered.get(fragment.source, 0) + len(fragment)
        return self._take(fragment)

    def _take(self, window: DrawnWindow) -> Offer:
        count, length = len(window), self._points.length
        if window.epoch < self._points.epoch:
            return Offer(stale=count)
        taken_over = self._silent >= _SILENT_ROUNDS
        if window.base > length or (self._owner not in (0, window.source) and not taken_over):
            return Offer(refused=count)
        if self._points.hash_at(window.base) != window.prefix_hash:
            return Offer(stale=count)
        if window.base <= self._base:
            return Offer(duplicate=count)
        self._base, self._owner, self._silent = window.base, window.source, 0
        opened = OpenWindow(window)
        if not opened.follow(self._points.committed_from(window.base)):
            return Offer(stale=count)
        self._window, self._ranked, self._judged = opened, False, 0
        return Offer(kept=count)

    def rank(self, node_limit: int) -> RankedNodes | WindowRanking:
        """The levels and nodes that a round of up to `node_limit` nodes could verify, most valuable first."""
        points, window = self._points.rank(node_limit), self._window
        if window is None:
            return points
        self._ranked = True
        depth = min(window.depth, self._end - self._points.length, node_limit // window.width)
        return WindowRanking(window, self._rates.survivals(max(0, depth)), points, node_limit)

    def judges(self, depth: int) -> None:
        """Notes how many levels of the window the next commit has judged."""
        self._judged = depth

    def drafted_along(self, tokens: Sequence[int]) -> list[DraftedPlace]:
        """What sources had drafted in place of these tokens; see `DraftPool.drafted_along`."""
        places = self._points.drafted_along(tokens)
        if self._window is None or not self._ranked:
            return places
        drawn = (self._window.source,)
        right = self._window.known(tokens)
        own = [DraftedPlace(drawn, drawn) for _ in range(right)]
        if right < min(len(tokens), self._window.depth):
            own.append(DraftedPlace(drawn, ()))
        return [
            DraftedPlace(tuple({*a.drafted, *b.drafted}), a.right + b.right)
            for a, b in zip_longest(own, places, fillvalue=_NOTHING)
        ]

    def commit(self, tokens: Sequence[int]) -> int:
        """Moves the window's root along newly committed ids; returns the number of nodes dropped."""
        window, dropped = self._window, 0
        self._silent += 1
        reached = 0 if window is None else min(window.known(tokens), self._judged)
        self._rates.judged(self._judged, reached)
        self._judged = 0
        if window is not None and not window.follow(tokens):
            self._window, dropped = None, len(window)
        return dropped + self._points.commit(tokens)


def with_points(window: TokenTree, points: TokenTree) -> TokenTree:
    """One tree of a window's nodes and of point masses behind them; a node that both have is the window's."""
    if not len(points):
        return window
    tokens, parents = list(window.tokens), list(window.parents)
    survival, sources = list(window.survival), list(window.sources)
    places = {ROOT: ROOT}
    for node, (token, parent) in enumerate(zip(points.tokens, points.parents, strict=True)):
        above = places[parent]
        known = window.children(above).get(token) if above < len(window) else None
        if known is None:
            known = len(tokens)
            tokens.append(token)
            parents.append(above)
            survival.append(points.survival[node])
            sources.append(points.sources[node])
        places[node] = known
    return TokenTree(tuple(tokens), tuple(parents), tuple(survival), tuple(sources))
