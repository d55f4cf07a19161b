"""Lookahead decoding: scouts compute n-grams ahead of the text, which are drafted later (arXiv 2402.02057).

A window of columns runs ahead of each session. Column c holds up to N - 1 tokens, the target's own guesses
for places that follow each other; its first token stands c places behind the next one. The scouts make a
comb: the columns' first tokens are a chain below the last committed token, and each column hangs below its
own first token. A pass gives the token behind the end of each column. A column of N tokens is an n-gram: it
goes into the session's pool, and the column loses its first token. The draft is the n-grams that begin with
the last committed token.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from speculative.hashing import extend
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
from verifier_service.proposers.hit_rates import HitRates
from verifier_service.proposers.scouting import CommittedHash, Learnt, ScoutingProposer, said_after

_FIRST_BY_RANK = (0.3, 0.15, 0.1, 0.07, 0.05)
"""Initial hit rates of n-grams with the same first token, the most recently met n-gram first."""
_FIRST_DEEPER = 0.6
"""Initial probability that a later token of an n-gram is right if the tokens before are right."""
_FIRST_WORTH = 0.08
_LEAST_SURVIVAL = 0.02
_FIRST_TOKENS = 4096
"""Most first tokens of which a session keeps n-grams; the token met longest ago is forgotten first."""

NGram = tuple[int, ...]


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a LookaheadProposer, which needs only the target's tokens."""
    return ProposerPlan(LookaheadProposer.needs, lambda target: LookaheadProposer())


class NGramPool:
    """N-grams of one session by their first token, the one met last first.

    Args:
        each: the most n-grams of one first token.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._found: OrderedDict[int, list[NGram]] = OrderedDict()

    def add(self, ngram: NGram) -> None:
        """Adds an n-gram, or moves it to the front."""
        rest = ngram[1:]
        known = self._found.setdefault(ngram[0], [])
        if rest in known:
            known.remove(rest)
        known.insert(0, rest)
        del known[self._each :]
        self._found.move_to_end(ngram[0])
        if len(self._found) > _FIRST_TOKENS:
            self._found.popitem(last=False)

    def after(self, token: int) -> Sequence[NGram]:
        """The continuations of a token in its n-grams, the most recent first."""
        return self._found.get(token, ())


class _Window:
    """The columns and the n-grams of one session, with its drafting request."""

    def __init__(self, session: ProposedSession, width: int, size: int) -> None:
        self.ids = session.ids
        self.pool = NGramPool(width)
        self.drafted: dict[tuple[int, ...], int] = {}
        """Rank of the n-gram that offered each path of the last draft."""
        self._hash = CommittedHash(session.ids)
        self._size = size
        self._columns = [[session.ids[-1 - at % len(session.ids)]] for at in reversed(range(width))]

    def scouts(self, node_limit: int, worth: float) -> ScoutAsk | None:
        """Scouts of the columns, one column after the other, up to the node limit; None if no column fits."""
        tokens: list[int] = []
        parents: list[int] = []
        above = ROOT
        for column in self._columns:
            if len(tokens) + len(column) > node_limit:
                break
            first = len(tokens)
            tokens += column
            parents += [above, *range(first, first + len(column) - 1)]
            above = first
        return ScoutAsk(tuple(tokens), tuple(parents), (worth,) * len(tokens)) if tokens else None

    def update(self, shown: SeenRound) -> int:
        """Extends the columns by the target's tokens behind them; returns the number of computed scouts."""
        prefix = self._hash.at(shown.position)
        said = said_after(prefix, shown)
        computed = 0
        for column in self._columns:
            prefix = end = extend(prefix, column[0])
            computed += end in said
            for token in column[1:]:
                end = extend(end, token)
                computed += end in said
            if end in said:
                self._extend(column, said[end])
        for _ in range(min(len(shown.tokens) - 1, len(self._columns))):
            self._columns = [*self._columns[1:], [self._columns[-1][-1]]]
        return computed

    def _extend(self, column: list[int], token: int) -> None:
        column.append(token)
        if len(column) == self._size:
            self.pool.add(tuple(column))
            del column[0]


class LookaheadProposer(ScoutingProposer[_Window]):
    """A BatchedProposer that needs neither a model nor a text.

    Args:
        window: number of columns, W; also the most n-grams kept for one first token.
        size: tokens of an n-gram, N; at least 2. A window asks for W (N - 1) scouts.
    """

    needs = ProposerNeeds(tops=1)

    def __init__(self, window: int = 5, size: int = 3) -> None:
        super().__init__(_FIRST_WORTH)
        self._width, self._size = window, size
        self._by_rank = HitRates(_FIRST_BY_RANK)
        self._deeper = HitRates([_FIRST_DEEPER] * size)

    def begin(self, session: ProposedSession) -> _Window:
        """Begins a window with the session's last tokens."""
        return _Window(session, self._width, self._size)

    def learn(self, guesses: _Window, shown: SeenRound) -> Learnt:
        """Moves the window on, and learns how often the drafted n-grams were right."""
        right = self._right(guesses.drafted, shown.tokens)
        return Learnt(guesses.update(shown), right)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """One level: the n-grams that continue the last token as branches, and the columns as scouts."""
        yield [self._level(self.sessions[ask.handle], ask.node_limit) for ask in asks]

    def _level(self, window: _Window, node_limit: int) -> DraftLevel:
        paths: dict[tuple[int, ...], float] = {}
        window.drafted = {}
        for rank, rest in enumerate(window.pool.after(window.ids[-1])[: len(self._by_rank)]):
            survival = self._by_rank[rank]
            for depth in range(1, len(rest) + 1):
                if depth > 1:
                    survival *= self._deeper[depth - 1]
                if survival < _LEAST_SURVIVAL or (len(paths) >= node_limit and rest[:depth] not in paths):
                    break
                paths.setdefault(rest[:depth], survival)
                window.drafted.setdefault(rest[:depth], rank)
        places = {path: node for node, path in enumerate(paths)}
        parents = tuple(places.get(path[:-1], ROOT) for path in paths)
        scouts = window.scouts(node_limit, self.worth.each)
        return DraftLevel(tuple(path[-1] for path in paths), parents, tuple(paths.values()), scouts)

    def _right(self, drafted: dict[tuple[int, ...], int], tokens: tuple[int, ...]) -> int:
        """Learns from one round's tokens; returns how many of the tokens the draft had."""
        right = 0
        while right < len(tokens) and tokens[: right + 1] in drafted:
            right += 1
        for path, rank in drafted.items():
            depth = len(path)
            if path[:-1] == tokens[: depth - 1] and depth <= len(tokens):
                hit = path[-1] == tokens[depth - 1]
                if depth == 1:
                    self._by_rank.learn(rank, hit)
                else:
                    self._deeper.learn(depth - 1, hit)
        return right
