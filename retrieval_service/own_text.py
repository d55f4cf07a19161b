"""The session's own text as a memory: what followed its last tokens earlier in it.

The verifier's lookup drafts from the same text, sooner; here it is evidence for and against what the other
memories found. Nothing is indexed: the last tokens are compared with the text in a few array operations.
"""

from array import array

import numpy as np

from retrieval_service.trie import CountedTrie, counted

REACH = 4096
"""Last tokens of the session that are searched."""
_LONGEST = 32
_READ = 8
"""Latest occurrences that are read."""


def look_back(ids: "array[int]", *, node_limit: int, depth: int) -> CountedTrie | None:
    """What followed the longest suffix of the session's ids that occurred before; None for a new last id."""
    if not ids:
        return None
    text = np.frombuffer(ids[-REACH:], dtype=np.uint64)
    ends = np.flatnonzero(text[:-1] == text[-1])
    if not len(ends):
        return None
    length = 1
    while length < _LONGEST:
        # A place too near the beginning has nothing before it.
        inside = ends[ends >= length]
        longer = inside[text[inside - length] == text[len(text) - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    following = [text[end + 1 : end + 1 + depth].tolist() for end in ends[-_READ:]]
    return counted(following, length, node_limit)
