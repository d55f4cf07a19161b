"""arctic-inference's suffix cache, where it is installed: what Outrider's past outputs are compared with."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

READER = "asks"
"""The cache's request under which contexts are looked up."""
CONTEXT = 64
"""Most last tokens of a context that the cache gets."""


class ArcticCache:
    """The suffix cache with the calls that benchmarks make. Use `open_arctic_cache`."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._growing: set[str] = set()
        self.begin(READER, [0])

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        """Starts the request `name` with its prompt."""
        self._growing.add(name)
        self._cache.start_request(name, np.array(prompt, np.int32))

    def extend(self, name: str, ids: Sequence[int]) -> None:
        """Adds ids to the output of the request `name`; a new request gets the first id as its prompt."""
        if name not in self._growing:
            self.begin(name, ids[:1])
        self._cache.add_active_response(name, list(ids))

    def finish(self, name: str) -> None:
        """Ends the request `name` and keeps its output."""
        self._growing.discard(name)
        self._cache.stop_request(name)

    def speculate(self, ids: Sequence[int], nodes: int) -> Any:
        """The cache's own draft of at most `nodes` nodes after a context."""
        return self._cache.speculate(
            READER,
            np.array(ids[-CONTEXT:], np.int32),
            max_spec_tokens=nodes,
            max_spec_factor=4.0,
            min_token_prob=0.01,
            use_tree_spec=True,
        )


def open_arctic_cache() -> ArcticCache | None:
    """An empty suffix cache at its default depth; None where arctic-inference is not installed."""
    if importlib.util.find_spec("arctic_inference") is None:
        return None
    return ArcticCache(importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache())
