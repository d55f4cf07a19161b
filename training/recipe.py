"""What a pair is made of: shapes, sizes of vocabulary and batches, learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from training.model import DRAFTER, TARGET, Shape


@dataclass(frozen=True)
class Recipe:
    """Sizes are in tokens; `only` keeps library files under these prefixes (all files if empty)."""

    target: Shape = TARGET
    drafter: Shape = DRAFTER
    only: tuple[str, ...] = ()
    window: int = 256
    batch: int = 3072
    target_rate: float = 4e-3
    drafter_rate: float = 8e-3
    held_windows: int = 32
    evaluate_every: float = 150.0
    continued_rows: int = 320
    source_rows: int = 2400
    long_rows: int = 64
    """Windows for the drafter to learn from: continued by the target, and of source text, short and long."""
    chunk: int = 64
    """Rows that the target continues at once."""

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer, eos included."""
        return self.target.vocabulary

    @property
    def eos(self) -> int:
        """The id that ends a text."""
        return self.vocabulary - 1


EMBEDDED = Recipe()

TOY = Recipe(
    target=Shape(
        layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, inner=128, vocabulary=512, context=512
    ),
    drafter=Shape(
        layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, inner=64, vocabulary=512, context=512
    ),
    only=("json/", "html/", "urllib/"),
    window=32,
    batch=512,
    held_windows=8,
    evaluate_every=2.0,
    continued_rows=32,
    source_rows=32,
    long_rows=4,
    chunk=16,
)

PRESETS = {"embedded": EMBEDDED, "toy": TOY}
