"""Keeps Python's garbage collector away from objects that live as long as the process."""

import gc


def freeze() -> None:
    """Collects garbage once, then exempts all objects that exist now from further collections.

    A collection that walks a model and its libraries stops all threads for some 200 ms.
    """
    gc.collect()
    gc.freeze()
