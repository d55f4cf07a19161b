"""How many pending rows of each session a step computes.

Pure: knows counts and milliseconds, nothing of sessions, trees or models.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

# Of a step's rows, the share that prefills keep however many sessions decode, so that none starves.
_PREFILL_FLOOR = 4
_PIECE = 16
"""Rows in whose multiples chunks are cut."""
# How many times what decoding takes by itself a step may last: where that alone is long, a prompt would
# otherwise get a few rows of each step, and hardly ever be through.
_SLOWER = 2.0


def chunk_rows(most: int, decoding: int, expected_ms: Callable[[int], float], stall_ms: float) -> int:
    """Rows that prefills and decoding share in the next step, at most `most`.

    Beside `decoding` rows of other sessions, whose streams stand still meanwhile, as many as let the step
    take no longer than `stall_ms`, or twice what these rows take by themselves where that is more: with fewer
    there would be more steps, each with its own cost. Alone a prefill may take what it likes.
    """
    if not decoding:
        return max(1, most)
    patience_ms = max(stall_ms, _SLOWER * expected_ms(decoding))
    if expected_ms(most) <= patience_ms:
        return max(1, most)
    pieces = range(2, most // _PIECE + 1)
    fitting = bisect_left(pieces, True, key=lambda count: expected_ms(count * _PIECE) > patience_ms)
    return min(most, (fitting + 1) * _PIECE)


def pending_rows(pending: Sequence[int], nodes: Sequence[int], chunk: int) -> list[int]:
    """Rows of committed ids that each session computes in the next step.

    `pending[i]` (at least 1) is how many committed ids of session i the target has not seen; `nodes[i]` is
    how many drafted nodes it would bring. A session with one pending id decodes and is always in; the
    others prefill and share, first come first served, what decoding leaves of `chunk` rows, at least a
    quarter of it. 0 means that the session sits this step out.
    """
    decoding = sum(1 + count for rows, count in zip(pending, nodes, strict=True) if rows == 1)
    left = max(chunk - decoding, chunk // _PREFILL_FLOOR, 1)
    sizes = []
    for rows in pending:
        size = 1 if rows == 1 else min(rows, left)
        left -= 0 if rows == 1 else size
        sizes.append(size)
    return sizes
