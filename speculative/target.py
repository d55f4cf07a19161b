"""The target's own token at each node of a round's tree: that node's logits, history, position and noise.

One per session and round. Knows nothing of models: logits come from a function of the node.
"""

from collections.abc import Callable

from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import History, Logits, choose


class TargetTokens:
    """Callable as `path_match` wants it; processes the nodes it is asked about and no others.

    Args:
        params: the request's.
        history: all committed ids.
        noise: rows of the request's seed.
        length: number of committed ids, that is, the position of the root's token.
        logits: the target's logits at a node (-1 for the last committed token): float[V].
    """

    __slots__ = ("_history", "_length", "_logits", "_noise", "_params")

    def __init__(
        self,
        params: SamplingParams,
        history: History,
        noise: NoiseRows,
        length: int,
        logits: Callable[[int], Logits],
    ) -> None:
        self._params = params
        self._history = history
        self._noise = noise
        self._length = length
        self._logits = logits

    def __call__(self, node: int, path_tokens: tuple[int, ...]) -> int:
        """The token at `node`, where `path_tokens` are those from the root's child to it.

        Raises:
            EmptySupport: as for `choose`.
        """
        # What comes next stands at the depth's position, wherever the node's row lies in the batch.
        row = None if self._params.greedy else self._noise.row(self._length + len(path_tokens))
        history = self._history.with_path(path_tokens)
        return choose(self._logits(node), self._params, history, row)
