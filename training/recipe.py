"""Recipes of a pair: model shapes, sizes of vocabulary and batches, learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from training.model import DRAFTER, TARGET, LlamaShape


@dataclass(frozen=True)
class Recipe:
    """The recipe of one pair; sizes are in tokens."""

    target: LlamaShape = TARGET
    drafter: LlamaShape = DRAFTER
    only: tuple[str, ...] = ()
    """Prefixes of the library files to train on; empty: all files."""
    window: int = 256
    """Length of the target's first training windows."""
    batch: int = 3072
    """Tokens in a batch."""
    target_rate: float = 4e-3
    """Peak learning rate of the target."""
    drafter_rate: float = 8e-3
    """Peak learning rate of the drafter."""
    held_windows: int = 32
    """Number of held-out windows in an evaluation."""
    evaluate_every: float = 150.0
    """Processor time between two evaluations, in seconds."""
    continued_rows: int = 320
    """Number of the drafter's training windows that the target continues."""
    source_rows: int = 2400
    """Number of the drafter's training windows of source text."""
    long_rows: int = 64
    """Number of the drafter's long training windows of source text."""
    chunk: int = 64
    """Number of rows that the target continues at once."""

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
    target=LlamaShape(
        layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, inner=128, vocabulary=512, context=512
    ),
    drafter=LlamaShape(
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
