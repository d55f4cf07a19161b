"""The target's own token at each node of a round's tree, from that node's digest, history and noise.

Knows nothing of models: digests of logits come from a function of the node.
"""

from collections.abc import Callable

from speculative.acceptance.path_match import Match
from speculative.choice import ChoiceCounts, choose_token, digest_logprob
from speculative.digest import RowDigest
from speculative.grammar import Matcher
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import Mask, process_logits, token_logprob
from speculative.tree import ROOT


class TargetSampler:
    """Samples the target's token at single nodes of one session's tree in one round.

    Callable as `path_match` requires; processes only the nodes that are asked for.

    Args:
        params: sampling parameters of the request.
        history: all committed ids.
        noise: noise of the session, by position.
        length: number of committed ids, which is the position of the token after them.
        digests: the digest of the target's logits at a node (-1 for the last committed token).
        grammar: the grammar's state after all committed ids; None: the request has no grammar.
        counts: counts the tokens chosen, and those that took a whole row; None: nobody counts.
    """

    __slots__ = ("_counts", "_digests", "_grammar", "_history", "_known", "_length", "_noise", "_params")

    def __init__(
        self,
        params: SamplingParams,
        history: History,
        noise: NoiseRows,
        length: int,
        digests: Callable[[int], RowDigest],
        grammar: Matcher | None = None,
        counts: ChoiceCounts | None = None,
    ) -> None:
        self._params = params
        self._history = history
        self._noise = noise
        self._length = length
        self._digests = digests
        self._grammar = grammar
        self._counts = counts
        self._known: dict[int, RowDigest] = {}

    def __call__(self, node: int, path_tokens: tuple[int, ...]) -> int:
        """The target's token after `node`; `path_tokens` are the tokens from the root's child to the node.

        Raises:
            EmptySupport: as for `sample_token`, and where the grammar allows no id after the node.
        """
        # The position follows from the node's depth, wherever the node's row lies in the batch.
        noise = None if self._params.greedy else self._noise.at(self._length + len(path_tokens))
        history = self._history.with_path(path_tokens)
        allowed = self._allowed(path_tokens)
        return choose_token(self._digest(node), self._params, history, noise, allowed, self._counts)

    def _digest(self, node: int) -> RowDigest:
        """The node's digest, one object, so that log-probabilities reuse what the token needed."""
        digest = self._known.get(node)
        if digest is None:
            digest = self._known[node] = self._digests(node)
        return digest

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
        digest = self._digest(node)
        if asked.logprobs_of is LogprobsOf.PROCESSED:
            history = self._history.with_path(path_tokens)
            processed = process_logits(digest.full(), self._params, history, self._allowed(path_tokens))
            return token_logprob(processed, token, asked.top_logprobs)
        return raw_logprob(digest, token, asked.top_logprobs)


def raw_logprob(digest: RowDigest, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of a token and of the `top` likeliest ids, from unprocessed logits."""
    found = digest_logprob(digest, token, top)
    return token_logprob(digest.full(), token, top) if found is None else found
