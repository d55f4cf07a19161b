"""A followed session whose drafts are windows drawn from the model's own distribution, sent with it."""

from collections.abc import Sequence
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import DraftNode, DraftTree, Growth, Rerooted
from drafter_service.drawn_tree import DrawnTree
from drafter_service.session import Abilities, Cache, DraftingSession
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds
from speculative.draft_law import DraftLaws
from speculative.fragment import Fragment
from speculative.policies.policy import DraftPolicy
from speculative.window_shape import SHAPES

_PATIENCE = 4
"""Durations of a window's passes for which rounds may wait for the window."""
_WAITS_MS = (16, 512)
"""The shortest and the longest wait to ask for."""


class DrawingSession(DraftingSession):
    """A session that names a criterion of `SHAPES`. Policies and estimates play no part in its drafts."""

    def __init__(self, follow: Follow, ids: FollowedIds, cache: Cache, abilities: Abilities) -> None:
        request = follow.request
        self._shape = SHAPES[request.criterion].within(request.node_limit)
        width = min(request.vocabulary_size, abilities.width)
        self._laws = DraftLaws(
            request.params,
            request.ids,
            request.prompt_length,
            width=width,
            bound=min(width, abilities.bound),
        )
        super().__init__(follow, ids, cache, abilities, Growth())
        self.asked_ms = 0
        """Milliseconds that the verifier was asked to wait for windows; 0: it was not asked yet."""

    def wait_ms(self, pass_s: float) -> int:
        """Milliseconds to ask for where a pass takes `pass_s` seconds: a power of two, to change rarely."""
        shortest, longest = _WAITS_MS
        needed = _PATIENCE * self._shape.depth * pass_s * 1000
        return max(shortest, min(longest, 1 << ceil(log2(max(1.0, needed)))))

    def commit(self, ids: Sequence[int], now_ms: float = 0.0) -> Rerooted:
        """Moves to newly committed ids; the window that was under way is dropped, and the next one begins."""
        self._laws.push(ids)
        moved = super().commit(ids, now_ms)
        if ids and self._rows:
            self.cache.drop_nodes()
            self._rows = 0
        return moved

    def take_fragments(self) -> list[Fragment]:
        """The window when it is complete, and only the first time; see `DrawnTree`."""
        window = self._window.take_window(self.request.epoch)
        return [] if window is None else [window]

    def _new_tree(self, policy: DraftPolicy | None) -> DraftTree:
        self._window = DrawnTree(
            self.ids.array[-1],
            len(self.ids),
            self.ids.prefix_hash,
            shape=self._shape,
            seed=self.request.seed,
            end=min(self.request.limit - 2, self._abilities.max_length),
        )
        return self._window

    def _expand(self, node: DraftNode, logits: NDArray[np.float32]) -> None:
        self._window.draw(node, self._laws.after(logits[: self._width], self._path(node)))
