"""How many pending rows of each session a step computes.

Pure: knows counts, nothing of sessions, trees or models.
"""

from collections.abc import Sequence

# Of a step's rows, the share that prefills keep however many sessions decode, so that none starves.
_PREFILL_FLOOR = 4


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
