"""Noise drawn while the target computes, by a small thread that the engine's thread owns.

Sampled tokens need the noise of their positions when the pass ends, and the noise depends on seed and
position alone. Drawing releases the interpreter lock, so it costs the pass little. The engine's thread draws
what is missing by then: nothing waits for this thread.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue

from speculative.noise import NoiseRows
from speculative.sampling_kernel import current_kernel
from speculative.tree import ROOT, TokenTree

log = logging.getLogger(__name__)

LEAST_VOCABULARY = 16_384
"""A smaller vocabulary's noise takes less time to draw than to hand to another thread."""
LEAST_FOR_KERNEL = 2**20
"""Number of ids, over all sessions of a pass, below which a kernel draws the noise in less time than that."""
_LIKELY = 0.3
"""Least survival of a drafted node at a depth whose noise is drawn ahead."""

Wanted = tuple[NoiseRows, Sequence[int]]
"""Noise of a session, and the positions to draw, the most urgent first."""


def positions_ahead(length: int, tree: TokenTree) -> list[int]:
    """Positions whose noise a session of `length` ids needs soon, the most urgent first.

    The pass chooses the token at `length` in any case, and the next pass at the latest the token after it.
    Further tokens are chosen where the target follows the drafts.
    """
    likeliest = [1.0, 1.0]
    depths: list[int] = []
    for parent, survival in zip(tree.parents, tree.survival, strict=True):
        depth = 1 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if depth == len(likeliest):
            likeliest.append(0.0)
        likeliest[depth] = max(likeliest[depth], survival)
    return [length + depth for depth, survival in enumerate(likeliest) if survival >= _LIKELY]


class NoiseAhead:
    """Draws noise until it is stopped; a new request replaces what is left of the one before.

    Args:
        vocabulary_size: number of ids of each session.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._asked = False
        """Whether the last request asked for noise, some of which may not be drawn yet."""
        self._requests: SimpleQueue[Sequence[Wanted] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="noise", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def draw(self, wanted: Sequence[Wanted]) -> None:
        """Has this noise drawn, every session's first position before any second one; returns at once.

        What a kernel draws sooner than it can be handed over is left to the engine's thread.
        """
        least = 1 if current_kernel() is None else LEAST_FOR_KERNEL
        pays = len(wanted) * self._vocabulary_size >= least
        if pays or self._asked:
            self._requests.put(wanted if pays else ())
        self._asked = pays

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the position that it draws; returns whether it ended in time."""
        self._requests.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (wanted := self._requests.get()) is not None:
            try:
                for rows, position in _in_turn(wanted):
                    drawn = rows.draw_ahead(position)
                    if current_kernel() is None:  # a kernel finds strong noise by itself
                        drawn.prepare()
                    if not self._requests.empty():
                        break
            except Exception:
                log.exception("noise could not be drawn ahead; the engine draws it when it needs it")


def _in_turn(wanted: Sequence[Wanted]) -> Iterable[tuple[NoiseRows, int]]:
    """Every session's first position, then every session's second one, and so on."""
    for turn in range(max([len(positions) for _, positions in wanted], default=0)):
        for rows, positions in wanted:
            if turn < len(positions):
                yield rows, positions[turn]
