"""The order of a text's suffixes, by divsufsort over its bytes.

Big-endian ids compare as their bytes do, so the suffixes that begin at an id are, among those of all bytes,
in the order of the ids. If fewer bytes distinguish all ids, fewer are sorted.
"""

from typing import cast

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 20
LARGEST_TEXT = (2**31 - 1) // 3
"""Ids that the sorter's 32-bit positions reach at three bytes each."""

Ids = npt.NDArray[np.unsignedinteger]


def order_suffixes(text: Ids, separator: int) -> npt.NDArray[np.int32]:
    """Suffix array of `text`: the positions, sorted by the suffixes that begin there.

    `text` holds documents backwards. Positions of separators and of documents' last ids are left out, since
    nothing follows them that could be drafted. A suffix that is a prefix of another comes first. Takes five
    times the bytes that are sorted.
    """
    if not len(text):
        return np.empty(0, dtype=np.int32)
    from pydivsufsort import divsufsort

    followed = text != separator
    followed[1:] &= text[:-1] != separator
    followed[0] = False
    data, width = _narrowed(text, separator)
    order = cast("npt.NDArray[np.int32]", divsufsort(data))
    return _picked(order, width, followed)


def _narrowed(text: Ids, separator: int) -> tuple[npt.NDArray[np.uint8], int]:
    """The bytes to sort, and the bytes per id: 2, or 3 where 2 do not suffice."""
    if text.dtype.itemsize == 2:
        return text.astype(">u2", copy=False).view(np.uint8), 2
    known = np.zeros(2**24, dtype=bool)
    for start in range(0, len(text), CHUNK):
        known[text[start : start + CHUNK] & 0xFFFFFF] = True
    if np.count_nonzero(known) > 0x10000:
        return np.ascontiguousarray(text.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]).ravel(), 3
    ranks = (np.cumsum(known, dtype=np.uint32) - 1).astype(">u2")
    narrow = np.empty(len(text), dtype=">u2")
    for start in range(0, len(text), CHUNK):
        narrow[start : start + CHUNK] = ranks[text[start : start + CHUNK] & 0xFFFFFF]
    return narrow.view(np.uint8), 2


def _picked(
    order: npt.NDArray[np.int32], width: int, followed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int32]:
    """Turns byte positions into those of followed ids, counted in ids; reuses the memory of `order`."""
    kept = 0
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK]
        part = part[part % width == 0] // width
        part = part[followed[part]]
        order[kept : kept + len(part)] = part
        kept += len(part)
    return order[:kept]
