"""Sorts a whole text at once when it is opened: several times faster than adding each position."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def context_order(ids: Ints, starts: Ints, context: int) -> Ints:
    """Indices into `ids`, sorted by the `context` ids that end at each, read backwards within its sequence.

    Prefix doubling: int64 [n] in, int64 [n] out, about six arrays of that size on the way.

    Args:
        ids: all sequences one after the other, int64 [n], at least 0.
        starts: where the sequence of each id begins, int64 [n].
        context: ids compared, a power of two. A sequence's beginning sorts after every id, ties by index.
    """
    places = np.arange(len(ids))
    rank = ids
    reach = 1
    while reach < context:
        rank = _ranks(rank)
        before = places - reach
        # One above all ranks where the sequence is shorter.
        farther = np.where(before >= starts, rank[np.maximum(before, 0)], len(ids))
        rank = rank * (len(ids) + 1) + farther
        reach *= 2
    return np.argsort(rank, kind="stable")


def _ranks(keys: Ints) -> Ints:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    ranks = np.empty_like(keys)
    ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))[: len(keys)]
    return ranks
