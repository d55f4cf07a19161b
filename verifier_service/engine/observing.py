"""What the target said at the rows of one session's round, for sources that asked.

Pure: digests of rows in, plain values out. Computed only where a source asks; decides no token.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from speculative.digest import HostDigest, Row, RowDigest
from speculative.errors import EmptySupport
from speculative.grammar import Matcher
from speculative.hashing import extend
from speculative.noise import Ids
from speculative.observed import Observed, OffPathRow, TopIds
from speculative.target_sampler import TargetSampler
from speculative.tree import ROOT
from verifier_service.engine.step import StepRows


def top_ids(digest: RowDigest, count: int) -> TopIds:
    """The `count` likeliest ids of a row, at most its width, with log-probabilities under the raw logits."""
    ids, logits = _ranked(digest, count)
    log_sum = _log_sum(digest)
    if log_sum is None:
        log_sum = HostDigest(digest.full()).log_sum()
    logprobs = logits.astype(np.float64) - (digest.highest()[1] + log_sum)
    return TopIds(tuple(ids.tolist()), tuple(logprobs.tolist()))


def _ranked(digest: RowDigest, count: int) -> tuple[Ids, Row]:
    """The `count` likeliest ids of a row and their logits, likeliest first."""
    found = digest.likeliest(count)
    if found is None:  # a device that was not asked ahead, for instance about a new wish
        found = HostDigest(digest.full()).likeliest(count)
    order = np.lexsort((found.ids, -found.logits))[:count]
    return found.ids[order], found.logits[order]


def _log_sum(digest: RowDigest) -> float | None:
    """Logarithm of the sum relative to the highest logit; from a float32 sum if the digest has such a sum."""
    mass = digest.mass(1.0)
    return digest.log_sum() if mass is None else math.log(mass.total)


class Observer:
    """Collects what the target said in one round of one session, before the round is committed.

    Args:
        step_rows: the session's rows, final ones.
        digests: digest of a node's row: -1 the last committed token, then the tree's nodes, then the scouts.
        target: samples the target's token after a node, given the tokens of the path to the node.
        grammar: the grammar's state after all committed ids; None: any text. Only its off-path
            matcher is asked, so that observing a text never uses up the limits of its grammar.
    """

    def __init__(
        self,
        step_rows: StepRows,
        digests: Callable[[int], RowDigest],
        target: TargetSampler,
        grammar: Matcher | None,
    ) -> None:
        self._step_rows = step_rows
        self._digests = digests
        self._grammar = None if grammar is None else grammar.off_path_matcher()
        self._target = target if self._grammar is None else target.under(self._grammar)
        self._sees_off_path = grammar is None or self._grammar is not None

    def observe(self, path: Sequence[int], prefix_hash: int, count: int) -> Observed:
        """What the target said on the accepted path and off it.

        Args:
            path: accepted nodes, from the root's child down.
            prefix_hash: hash of all ids committed before the round.
            count: number of likeliest ids to collect of each row.
        """
        count = min(count, self._digests(ROOT).vocabulary_size)
        tops = tuple([top_ids(self._digests(node), count) for node in (ROOT, *path)])
        off_path = self._off_path(frozenset(path), prefix_hash, count) if self._sees_off_path else ()
        return Observed(count, tops, tuple(off_path))

    def _off_path(self, path: frozenset[int], prefix_hash: int, count: int) -> list[OffPathRow]:
        tree, scouts = self._step_rows.tree, self._step_rows.scouts
        tokens, parents = tree.tokens + scouts.tokens, tree.parents + scouts.parents
        known, last = self._digests(ROOT).vocabulary_size, self._step_rows.chain[-1]
        prefixes: dict[int, tuple[tuple[int, ...], int]] = {ROOT: ((), prefix_hash)}
        rows = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent not in prefixes:
                continue
            before, hash_ = prefixes[parent]
            if not self._may_follow(before, token):
                continue
            # An id behind the vocabulary is no text. Penalties take it for a token that the text has.
            text = token if token < known else last
            tokens_to, hash_ = prefixes[node] = (*before, text), extend(hash_, token)
            if node in path:
                continue
            try:
                following = self._target(node, tokens_to)
            except EmptySupport:
                continue  # plain decoding never comes here, so nothing is wrong with the session
            ids, _ = _ranked(self._digests(node), count)
            rows.append(OffPathRow(hash_, token, following, tuple(ids.tolist())))
        return rows

    def _may_follow(self, before: tuple[int, ...], token: int) -> bool:
        """Whether the grammar allows a token there; what follows a forbidden token is not defined."""
        if self._grammar is None:
            return True
        try:
            allowed = self._grammar.allowed(before)
        except EmptySupport:
            return False
        return token < len(allowed) and bool(allowed[token])
