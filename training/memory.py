"""Keeps freed memory in the process; otherwise training spends a good part of its time on page faults."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LIMIT = 1 << 30


def keep_freed() -> None:
    """Tells glibc's allocator to reuse large blocks rather than return them; nothing under another libc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LIMIT)
        mallopt(_TRIM_THRESHOLD, 2 * _LIMIT - 1)
