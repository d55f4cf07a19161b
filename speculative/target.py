"""The target's own token at each node of a round's tree: that node's logits, history, position and noise.

One per session and round. Knows nothing of models: logits come from a function of the node.
"""

from collections.abc import Callable

from speculative.acceptance.path_match import Match
from speculative.grammar import Matcher
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import Logits, Mask, choose, processed, token_logprob
from speculative.tree import ROOT


class TargetTokens:
    """Callable as `path_match` wants it; processes the nodes it is asked about and no others.

    Args:
        params: the request's.
        history: all committed ids.
        noise: rows of the request's seed.
        length: number of committed ids, that is, the position of the root's token.
        logits: the target's logits at a node (-1 for the last committed token): float[V].
        grammar: the request's, after all committed ids; None: any text will do.
    """

    __slots__ = ("_grammar", "_history", "_length", "_logits", "_noise", "_params")

    def __init__(
        self,
        params: SamplingParams,
        history: History,
        noise: NoiseRows,
        length: int,
        logits: Callable[[int], Logits],
        grammar: Matcher | None = None,
    ) -> None:
        self._params = params
        self._history = history
        self._noise = noise
        self._length = length
        self._logits = logits
        self._grammar = grammar

    def __call__(self, node: int, path_tokens: tuple[int, ...]) -> int:
        """The token at `node`, where `path_tokens` are those from the root's child to it.

        Raises:
            EmptySupport: as for `choose`, and where the grammar leads nowhere from there.
        """
        # What comes next stands at the depth's position, wherever the node's row lies in the batch.
        row = None if self._params.greedy else self._noise.row(self._length + len(path_tokens))
        history = self._history.with_path(path_tokens)
        return choose(self._logits(node), self._params, history, row, self._allowed(path_tokens))

    def _allowed(self, path_tokens: tuple[int, ...]) -> Mask | None:
        """The node's own: what the grammar has after the path to it."""
        return None if self._grammar is None else self._grammar.allowed(path_tokens)

    def told(self, match: Match, asked: Logprobs | None) -> Match:
        """The match with what its tokens were to the target, from the logits that chose them."""
        if asked is None:
            return match
        return match._replace(
            logprobs=tuple(
                self._logprob(node, match.tokens[:depth], match.tokens[depth], asked)
                for depth, node in enumerate((ROOT, *match.path))
            ),
        )

    def _logprob(self, node: int, path_tokens: tuple[int, ...], token: int, asked: Logprobs) -> TokenLogprob:
        scores = self._logits(node)
        if asked.logprobs_of is LogprobsOf.PROCESSED:
            history = self._history.with_path(path_tokens)
            scores = processed(scores, self._params, history, self._allowed(path_tokens))
        return token_logprob(scores, token, asked.top_logprobs)
