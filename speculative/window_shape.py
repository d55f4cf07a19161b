"""How many draws a window has below each node, by the criterion that will judge them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Several draws below the base, and a chain of single draws below each of these."""

    draws: int
    """Draws below the base."""
    depth: int
    """The longest path below the base, in nodes."""
    distinct: bool = False
    """Whether siblings are drawn without repetition."""

    def within(self, node_limit: int) -> "WindowShape":
        """The shape with as many whole levels as a round may verify, but one at least."""
        draws = max(1, min(self.draws, node_limit))
        return WindowShape(draws, max(1, min(self.depth, node_limit // draws)), self.distinct)


_CHAIN = WindowShape(draws=1, depth=6)
SHAPES = {
    "ratio": _CHAIN,
    "block": _CHAIN,
    "lenience": _CHAIN,
    "multi_step": WindowShape(draws=3, depth=4),
    "k_seq": WindowShape(draws=3, depth=4),
    "without_replacement": WindowShape(draws=3, depth=4, distinct=True),
}
"""The shape of windows for each criterion that needs q, by the criterion's name.

Ratio, block and lenience judge the first draw of a node alone. Shapes are fixed before anything is drawn."""
