"""The target's own token at each node of a round's tree, from that node's logits, history and noise.

Knows nothing of models: logits come from a function of the node.
"""

from collections.abc import Callable

from speculative.acceptance.path_match import Match
from speculative.grammar import Matcher
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import Logits, Mask, process_logits, sample_token, token_logprob
from speculative.tree import ROOT


class TargetSampler:
    """Samples the target's token at single nodes of one session's tree in one round.

    Callable as `path_match` requires; processes only the nodes that are asked for.

    Args:
        params: sampling parameters of the request.
        history: all committed ids.
        noise: noise of the session, by position.
        length: number of committed ids, which is the position of the token after them.
        logits: the target's logits at a node (-1 for the last committed token): float[V].
        grammar: the grammar's state after all committed ids; None: the request has no grammar.
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
        """The target's token after `node`; `path_tokens` are the tokens from the root's child to the node.

        Raises:
            EmptySupport: as for `sample_token`, and where the grammar allows no id after the node.
        """
        # The position follows from the node's depth, wherever the node's row lies in the batch.
        row = None if self._params.greedy else self._noise.row(self._length + len(path_tokens))
        history = self._history.with_path(path_tokens)
        return sample_token(self._logits(node), self._params, history, row, self._allowed(path_tokens))

    def _allowed(self, path_tokens: tuple[int, ...]) -> Mask | None:
        """Mask of the ids that the grammar allows after the path to the node."""
        return None if self._grammar is None else self._grammar.allowed(path_tokens)

    def with_logprobs(self, match: Match, asked: Logprobs | None) -> Match:
        """The match with its tokens' log-probabilities, from the logits that chose the tokens."""
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
            scores = process_logits(scores, self._params, history, self._allowed(path_tokens))
        return token_logprob(scores, token, asked.top_logprobs)
