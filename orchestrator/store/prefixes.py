"""At which lengths prefixes of a sequence are remembered. Pure.

At blocks of 16 ids all lengths would be thousands for a long context, so only those whose number of blocks
has at most four binary digits before its zeros: 8 for each doubling, so that at least seven eighths of any
overlap is found. Whoever remembers and whoever looks up take the same lengths.
"""

from collections.abc import Sequence

from speculative.hashing import prefix_hashes

BLOCK = 16
PER_DOUBLING = 8


def lengths(most: int) -> list[int]:
    """Up to `most` ids, the longest first."""
    found, blocks, step = [], 1, 1
    while blocks * BLOCK <= most:
        found.append(blocks * BLOCK)
        if blocks == 2 * PER_DOUBLING * step:
            step *= 2
        blocks += step
    return found[::-1]


def hashes(ids: Sequence[int]) -> list[int]:
    """Of the prefixes of `ids` that are remembered, the longest first."""
    if len(ids) < BLOCK:
        return []
    every = prefix_hashes(ids)
    return [int(every[length]) for length in lengths(len(ids))]
