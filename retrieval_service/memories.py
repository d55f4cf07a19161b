"""What the service asks of each of its memories: corpora, past outputs, dense references."""

from collections.abc import Sequence
from typing import Protocol

from retrieval_service.trie import CountedTrie


class Memory(Protocol):
    """Text of one scope (a corpus, a tenant's past outputs, a session's references) that can be looked up."""

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """What followed the longest suffix of `ids` found here, up to `depth` ids; None where nothing did.

        Safe beside writers of other threads; well below a millisecond; never raises for any ids.
        """
        ...
