"""Contrastive decoding: the logits that two models make together; knows nothing of models.

Li et al. (2023), *Contrastive Decoding: Open-ended Text Generation as Optimization*, in the form of Yuan et
al. (2023), *Speculative Contrastive Decoding*, in which a strength of 0 is the expert alone. The result is a
function of the two rows, and so of the prefix: a path match verifies drafts against it, which change no id.
"""

import math
from typing import NamedTuple

import numpy as np

from speculative.digest import Row

DROPPED = 1e4
"""How far dropped ids lie behind the last of the others, in logits: no temperature brings them back."""


class Contrast(NamedTuple):
    """How an amateur's logits count against the expert's."""

    strength: float
    """Weight of the amateur, above 0: beta of (1 + beta) log p_expert - beta log p_amateur."""
    plausibility: float
    """Ids below this share of the expert's highest probability are dropped: alpha, above 0, at most 1."""


def contrasted(expert: Row, amateur: Row, contrast: Contrast) -> Row:
    """The contrastive logits of one position: float32[V], V as of the expert.

    They are (1 + strength) * expert - strength * amateur, and differ from the same of log-probabilities by a
    constant. So with less and less strength they become the expert's logits, as penalties need them. Dropped
    ids lie `DROPPED` behind the others, in the expert's order: where a grammar or a ban on the end leaves no
    other id, the expert decides alone.

    Args:
        expert: the target's logits, float32[V]; returned as they are if the highest is not finite.
        amateur: logits of the other model; ids that it does not know are dropped, and those to which it gives
            no probability at all count as its least likely ones.
        contrast: strength and plausibility.
    """
    own = expert[: len(amateur)].astype(np.float64)
    highest = float(own.max())
    if not math.isfinite(highest):
        return expert
    kept = np.flatnonzero(own >= highest + math.log(contrast.plausibility))
    against = amateur[kept].astype(np.float64)
    impossible = against == -np.inf
    if impossible.any():
        possible = amateur[amateur > -np.inf]
        against[impossible] = float(possible.min()) if len(possible) else 0.0
    scores = (1 + contrast.strength) * own[kept] - contrast.strength * against
    made: Row = (expert - np.float32(highest) + np.float32(scores.min() - DROPPED)).astype(np.float32)
    made[kept] = scores
    return made
