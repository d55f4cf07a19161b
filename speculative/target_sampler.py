"""The target's own token at each node of a round's tree, from that node's digest, history and noise.

Knows nothing of models: digests of logits come from a function of the node.
"""

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from speculative.acceptance.path_match import Match
from speculative.batch_choice import RowChoice, fewest, sample_rows
from speculative.choice import ChoiceCounts, choose_token, digest_logprob
from speculative.digest import HostDigest, RowDigest
from speculative.grammar import Matcher
from speculative.history import History
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.noise import Floats, NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import Mask, process_logits, token_logprob
from speculative.sampling_kernel import current_kernel
from speculative.tree import ROOT, TokenTree


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

    __slots__ = (
        "_chosen",
        "_counts",
        "_digests",
        "_grammar",
        "_history",
        "_is_plain",
        "_known",
        "_length",
        "_noise",
        "_params",
    )

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
        self._chosen: dict[int, int] = {}
        self._is_plain = grammar is None and params.greedy and params.plain_logits
        """Whether a token is the highest logit's."""

    def __call__(self, node: int, path_tokens: tuple[int, ...]) -> int:
        """The target's token after `node`; `path_tokens` are the tokens from the root's child to the node.

        Raises:
            EmptySupport: as for `sample_token`, and where the grammar allows no id after the node.
        """
        chosen = self._chosen.get(node)
        if chosen is not None:
            if self._counts is not None:
                self._counts.tokens += 1
            return chosen
        if self._is_plain:
            # As `choose_token` would, at a fraction of the time: a step of many sessions asks very often.
            token, highest = self._digest(node).highest()
            if isfinite(highest):
                if self._counts is not None:
                    self._counts.tokens += 1
                return token
        # The position follows from the node's depth, wherever the node's row lies in the batch.
        noise = None if self._params.greedy else self._noise.at(self._length + len(path_tokens))
        history = self._history.with_path(path_tokens)
        allowed = self._allowed(path_tokens)
        return choose_token(self._digest(node), self._params, history, noise, allowed, self._counts)

    def log_probabilities(self, node: int, path_tokens: tuple[int, ...]) -> Floats:
        """Log-probabilities of the processed row after `node`: float64[V]; before temperature where greedy.

        Fetches the whole row. Raises EmptySupport, as the token itself does.
        """
        history = self._history.with_path(path_tokens)
        full = self._digest(node).full()
        scores = process_logits(full, self._params, history, self._allowed(path_tokens))
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        return scores

    def probabilities(self, node: int, path_tokens: tuple[int, ...]) -> Floats:
        """The distribution that the token after `node` is sampled from: float64[V], sum 1.

        Fetches the whole row unless decoding is greedy. Raises EmptySupport.
        """
        if self._params.greedy:
            weights = np.zeros(self._digest(node).vocabulary_size)
            weights[self(node, path_tokens)] = 1.0
            return weights
        weights = np.exp(self.log_probabilities(node, path_tokens))
        weights /= weights.sum()
        return weights

    def under(self, grammar: Matcher) -> "TargetSampler":
        """A sampler of the same rows under another matcher, in the same state."""
        return TargetSampler(self._params, self._history, self._noise, self._length, self._digests, grammar)

    @property
    def may_batch(self) -> bool:
        """Whether rows in memory can be chosen together with other sessions' rows.

        A kernel takes all but greedy rows that nothing changes, of which a digest knows the token anyway.
        """
        if self._is_plain:
            return False
        return current_kernel() is not None or (not self._params.greedy and self._grammar is None)

    def row_choice(self, node: int, path_tokens: tuple[int, ...]) -> RowChoice | None:
        """What decides the token after `node`; None where its row is not in memory. For `sample_together`.

        Raises EmptySupport where the grammar allows no id after the node.
        """
        digest = self._digest(node)
        if not isinstance(digest, HostDigest):
            return None
        params, history, allowed = self._params, self._history, None
        noise = None if params.greedy else self._noise.at(self._length + len(path_tokens))
        if params.reads_history:
            history = history.with_path(path_tokens)
        if self._grammar is not None:
            allowed = self._grammar.allowed(path_tokens)
        return RowChoice(digest, params, history, noise, allowed)

    def note(self, node: int, token: int) -> None:
        """Notes the token after `node` that `sample_together` found."""
        self._chosen[node] = token

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


_Walk = tuple[TargetSampler, TokenTree, int, tuple[int, ...]]
"""A sampler, its session's tree, a node of the tree, and the tokens that lead to the node."""


def sample_together(walks: Sequence[tuple[TargetSampler, TokenTree]]) -> None:
    """Chooses along the trees of several sessions at once, level by level; their samplers keep the tokens.

    Changes no token: if a node's token is not found here, for any reason, the node's sampler chooses it.
    """
    level: list[_Walk] = [(sampler, tree, ROOT, ()) for sampler, tree in walks if sampler.may_batch]
    least = fewest()
    while len(level) >= least:
        asked, choices = [], []
        for walk in level:
            try:
                choice = walk[0].row_choice(walk[2], walk[3])
            except Exception:  # the sampler meets the error again, which then ends only its own session
                choice = None
            if choice is not None:
                asked.append(walk)
                choices.append(choice)
        try:
            tokens = sample_rows(choices)
        except (
            Exception
        ):  # each sampler chooses for itself, and one that meets the error ends only its session
            return
        level = []
        for (sampler, tree, node, path), token in zip(asked, tokens, strict=True):
            if token is not None:
                sampler.note(node, token)
                child = tree.children(node).get(token)
                if child is not None:
                    level.append((sampler, tree, child, (*path, token)))


def raw_logprob(digest: RowDigest, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of a token and of the `top` likeliest ids, from unprocessed logits."""
    found = digest_logprob(digest, token, top)
    return token_logprob(digest.full(), token, top) if found is None else found
