"""Drafts with PaSS's look-ahead tokens (arXiv 2311.13581): scouts that the target reads as further places.

A chain of look-ahead tokens hangs below the last committed token and below the nodes at which the round is
likeliest to end. What the target says at the k-th one is the draft k places behind the token that the round
adds. So one pass verifies a draft and prepares the next one; the paper alternates two kinds of passes.
"""

from collections.abc import Iterator, Mapping, Sequence

from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.published import load_head
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest, ModelRefused
from speculative.hashing import extend
from speculative.observed import OffPathRow
from speculative.tree import ROOT
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    ScoutAsk,
    SeenRound,
)
from verifier_service.proposers.heads.plan import planned_head
from verifier_service.proposers.hit_rates import HitRates
from verifier_service.proposers.scouting import CommittedHash, Learnt, ScoutingProposer
from verifier_service.proposers.successors import LevelTree

_FIRST_BY_RANK = (0.25, 0.1, 0.06, 0.04)
"""Initial hit rates of the ids that a look-ahead token gives: the target's choice, then its likeliest ids."""
_FIRST_WORTH = 0.08
_LEAST_SURVIVAL = 0.02
_ENDS = 3
"""Most nodes below which a chain of look-ahead tokens hangs, the last committed token included."""
_LEAST_END = 0.08
"""Least probability that a round ends at a node below which a chain hangs."""

Place = tuple[int, ...]
"""Ids that may stand at one place, the target's choice first."""


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a proposer whose look-ahead tokens get ids behind the target's vocabulary."""
    head, _ = planned_head(config)
    if config.ranks > 1:
        raise InvalidRequest(
            f"pass head {head.text!r} beside ranks = {config.ranks}: the target itself reads its look-ahead "
            "tokens, and its embeddings are split over the ranks; leave one of the two out"
        )
    needs = _needs(LookAheadEmbeddings.count(head))

    def load(target: PackedLM) -> LookAheadProposer:
        if target.pool.chains_only:
            raise ModelRefused(
                f"pass head {head.text!r} is refused: {target.model_type} verifies chains, and look-ahead "
                "tokens hang below branches",
                "pass",
            )
        module = load_head(head, TargetParts.of(target.model))
        assert isinstance(module, LookAheadEmbeddings)
        ids = target.add_embeddings(module.embeddings)
        _try_out(target, ids)
        return LookAheadProposer(ids)

    return ProposerPlan(needs, load)


def _needs(count: int) -> ProposerNeeds:
    return ProposerNeeds(tops=len(_FIRST_BY_RANK), scout_ids=count)


def _try_out(target: PackedLM, ids: range) -> None:
    """One pass over the look-ahead tokens. Raises ModelRefused where the target cannot read them."""
    table = target.table()
    try:
        target.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), ())])
    except (IndexError, RuntimeError) as error:
        why = f"{target.model_type} cannot read ids behind its vocabulary: {error}"
        raise ModelRefused(f"a pass head is refused: {why}", "pass") from error
    finally:
        target.release(table)


class _LookingAhead:
    """One session: its hash, and what may stand at its next places."""

    def __init__(self, session: ProposedSession, ids: range) -> None:
        self.session = session
        self.places: tuple[Place, ...] = ()
        self._hash = CommittedHash(session.ids)
        self._ids = ids

    def update(self, shown: SeenRound) -> int:
        """Takes the guesses behind a round's tokens; returns the number of computed look-ahead tokens."""
        rows = {} if shown.said is None else {row.prefix_hash: row for row in shown.said.off_path}
        prefix, self.places = self._hash.at(shown.position), ()
        for token in shown.tokens:
            # The chain above lost its first place to a token. A chain below this row, if any, knows more.
            self.places = self._chain(rows, prefix) or self.places[1:]
            prefix = extend(prefix, token)
        return sum(row.last in self._ids for row in rows.values())

    def _chain(self, rows: Mapping[int, OffPathRow], prefix: int) -> tuple[Place, ...]:
        """What the look-ahead tokens below a row say, in their order."""
        found = []
        for id_ in self._ids:
            prefix = extend(prefix, id_)
            if (row := rows.get(prefix)) is None:
                break
            found.append(tuple(dict.fromkeys((row.token, *row.top_ids)))[: len(_FIRST_BY_RANK)])
        return tuple(found)


class LookAheadProposer(ScoutingProposer[_LookingAhead]):
    """A BatchedProposer whose drafts are the target's own guesses at look-ahead tokens.

    Args:
        ids: ids of the look-ahead tokens, behind the target's vocabulary.
    """

    def __init__(self, ids: range) -> None:
        super().__init__(_FIRST_WORTH)
        self.needs = _needs(len(ids))
        self._ids = ids
        self._greedy, self._sampled = ([HitRates(_FIRST_BY_RANK) for _ in ids] for _ in range(2))

    def begin(self, session: ProposedSession) -> _LookingAhead:
        """Begins a session, whose first guesses come with its second round."""
        return _LookingAhead(session, self._ids)

    def learn(self, guesses: _LookingAhead, shown: SeenRound) -> Learnt:
        """Takes the target's guesses for the next places, and learns how good those before were."""
        right = self._right(guesses, shown.tokens)
        return Learnt(guesses.update(shown), right)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows all drafts place by place; the last level asks for the scouts of the next drafts."""
        states = [self.sessions[ask.handle] for ask in asks]
        growing = [_Growing(state, self._rates(state), ask) for state, ask in zip(states, asks, strict=True)]
        for place in range(len(self._ids)):
            levels = [draft.grow(place) for draft in growing]
            if place and not any(level.tokens for level in levels):
                return
            yield [
                level._replace(scouts=draft.scouts(self._ids, self.worth.each))
                for level, draft in zip(levels, growing, strict=True)
            ]

    def _rates(self, state: _LookingAhead) -> list[HitRates]:
        return self._greedy if state.session.params.greedy else self._sampled

    def _right(self, state: _LookingAhead, tokens: Sequence[int]) -> int:
        """Learns from a round's tokens; returns how many of them the guesses had."""
        rates, right = self._rates(state), 0
        for place, (ids, token) in enumerate(zip(state.places, tokens, strict=False)):
            for rank, id_ in enumerate(ids):
                rates[place].learn(rank, id_ == token)
            if token not in ids:
                break
            right += 1
        return right


class _Growing:
    """The draft of one session, level by level."""

    def __init__(self, state: _LookingAhead, rates: Sequence[HitRates], ask: DraftAsk) -> None:
        self._places, self._rates, self._node_limit = state.places, rates, ask.node_limit
        self._tree = LevelTree(state.session.ids[-1], ask.node_limit, _LEAST_SURVIVAL)
        self._nodes: list[tuple[int, int, float]] = []
        """Token, parent and survival of each node."""

    def grow(self, place: int) -> DraftLevel:
        """The likeliest ids of a place below all nodes of the place before; empty if none is worth a row."""
        ids = self._places[place] if place < len(self._places) else ()
        level = self._tree.add(
            (survival * self._rates[place][rank], node, id_)
            for node, _, survival in self._tree.leaves
            for rank, id_ in enumerate(ids)
        )
        level = level or DraftLevel((), (), ())
        self._nodes += zip(level.tokens, level.parents, level.survival, strict=True)
        return level

    def scouts(self, ids: range, worth: float) -> ScoutAsk | None:
        """Look-ahead tokens below the nodes at which the round is likeliest to end; None: no room."""
        ends = self._ends()
        mean = sum(share for share, _ in ends) / len(ends)
        tokens: list[int] = []
        parents: list[int] = []
        worths: list[float] = []
        for share, node in ends:
            path = self._path(node)
            first, added = len(tokens), (*path, *ids)
            tokens += added
            parents += (ROOT, *range(first, first + len(added) - 1))
            worths += [min(1.0, worth * share / mean)] * len(added)
        room = self._node_limit
        return ScoutAsk(tuple(tokens[:room]), tuple(parents[:room]), tuple(worths[:room])) if room else None

    def _ends(self) -> list[tuple[float, int]]:
        """Nodes at which the round is likeliest to end, with the probability; the likeliest first."""
        shares = {ROOT: 1.0} | {node: survival for node, (_, _, survival) in enumerate(self._nodes)}
        for _, parent, survival in self._nodes:
            shares[parent] -= survival
        likely = sorted(((share, node) for node, share in shares.items()), key=lambda end: (-end[0], end[1]))
        return [end for end in likely[:_ENDS] if end[0] >= _LEAST_END] or likely[:1]

    def _path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to a node."""
        tokens: list[int] = []
        while node != ROOT:
            token, node, _ = self._nodes[node]
            tokens.append(token)
        return tuple(reversed(tokens))
