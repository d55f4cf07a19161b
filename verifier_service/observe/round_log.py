"""The last rounds of each session, kept for Explain: why a request went as it did.

A round's record refers to what the step has made anyway; what the record means is worked out when somebody
asks. Bounded in rounds, over all sessions. Pure; for one thread at a time.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, takewhile
from types import MappingProxyType
from typing import NamedTuple

from outrider.wire.codec import SessionKey
from speculative.stop import FinishReason
from speculative.tree import ROOT, TokenTree

MOST_ROUNDS = 32_768
"""Number of rounds kept over all sessions; a round takes some 600 bytes without its tree."""
MOST_OF_A_SESSION = 512
"""How many rounds of one session are kept."""
TREES_OF_A_SESSION = 64
"""Number of a session's latest rounds that keep their trees; a tree of 16 nodes takes some 1.7 KB."""


class Rest(Enum):
    """Whether a source was sent a round, and if not, why."""

    NONE = "none"
    """The source was sent the round."""
    GAINS_TOO_LITTLE = "gains too little"
    """The source gains less than it costs, or less than the least that a source has to gain."""
    NOT_ADMITTED = "not admitted"
    """Steps of so many sessions admitted none of its nodes."""
    COMPARED = "compared"
    """All sessions leave the source alone for a few steps, to measure what it costs."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine as the round log keeps it; times are of time.perf_counter, in seconds."""

    number: int
    began_s: float
    """When the forward began."""
    ended_s: float
    """When the forward ended."""
    sessions: int
    """Sessions in the step."""
    rows: int
    """Input tokens of the forward."""
    waited_s: float
    """How long the step waited for drafts."""

    @property
    def pass_ms(self) -> float:
        """Milliseconds that the forward took."""
        return 1000 * (self.ended_s - self.began_s)


UNTIMED_STEP = Step(0, 0.0, 0.0, 1, 0, 0.0)
"""A step of one session that nobody timed."""


class RoundTree(NamedTuple):
    """The columns of a round's TokenTree without the index of children, which takes three times the
    memory."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    survival: tuple[float, ...]
    sources: tuple[int, ...]

    @classmethod
    def of(cls, tree: TokenTree) -> "RoundTree":
        """The columns of a tree."""
        return cls(tree.tokens, tree.parents, tree.survival, tree.sources)

    def path(self, tokens: Iterable[int]) -> set[int]:
        """Indices of the nodes that carry these tokens, from the root down. Raises ValueError: none does."""
        nodes: set[int] = set()
        node = ROOT
        for token in tokens:
            node = next(
                (
                    child
                    for child, parent in enumerate(self.parents)
                    if parent == node and self.tokens[child] == token
                ),
                ROOT,
            )
            if node == ROOT:
                raise ValueError(f"no node of the round's tree carries the committed token {token}")
            nodes.add(node)
        return nodes


class SourceState(NamedTuple):
    """Whether a source that may rest was sent a round or drafted for it, and what was measured of it."""

    source: int
    """The source's index in the session."""
    rest: Rest
    slowdown: float | None
    """Part of its speed that a step loses while the source is followed; None: not measured."""


class RoundRecord(NamedTuple):
    """One round of one session."""

    step: Step
    position: int
    """Position of the round's first committed token."""
    uncomputed: int
    """Committed tokens that the target computed in this step, as it had not done so before."""
    prompt_passes: int
    """Steps before this one that computed nothing but parts of the session's prompt."""
    candidates: int
    """Drafted nodes that the budget could choose from."""
    admitted: tuple[int, ...]
    """Source index of each drafted node in the step."""
    token_sources: bytes
    """Source index of each token that the round committed; 0: the target itself."""
    drafted: Mapping[int, int]
    """Nodes offered since the session began here, by source index."""
    tokens: tuple[int, ...]
    """The tokens that the round committed."""
    tree: RoundTree | None
    """The drafted nodes in the step; None once the round is no longer among the latest."""
    states: tuple[SourceState, ...] = ()
    """Each source outside the worker that the session used, as it stood behind the round."""
    versions: Mapping[int, int] = MappingProxyType({})
    """Versions of learnt weights, by source index; a source of version 0 is left out."""

    def accepted_nodes(self) -> set[int]:
        """Indices of the tree's nodes that were committed as tokens; empty where the tree was dropped."""
        if self.tree is None:
            return set()
        pairs = zip(self.tokens, self.token_sources, strict=True)
        return self.tree.path(token for token, _ in takewhile(lambda pair: pair[1] != 0, pairs))


class SourceShare(NamedTuple):
    """One source's part in a round; all counts are of nodes."""

    source: int
    """The source's index in the session."""
    drafted: int
    admitted: int
    accepted: int


@dataclass(slots=True)
class SessionLog:
    """The rounds of one session under one epoch."""

    key: SessionKey
    epoch: int
    prompt_length: int
    """Length of the prompt, in tokens."""
    node_limit: int
    opened_s: float
    """When the session began here, on time.perf_counter."""
    source_names: tuple[str, ...] = ()
    """Names of the sources: source index k is source_names[k - 1]."""
    finished: FinishReason | None = None
    """Why the session ended; None while it is open."""
    rounds: deque[RoundRecord] = field(default_factory=deque)
    """The rounds that are kept, the oldest first."""
    forgotten: int = 0
    """How many older rounds were dropped."""
    _before: Mapping[int, int] = field(default_factory=dict)
    """Nodes offered before the oldest round that is kept, by source index."""

    def add(self, record: RoundRecord, most: int) -> int:
        """Adds a round, and drops the oldest beyond `most`; returns by how many rounds the log grew."""
        self.rounds.append(record)
        if len(self.rounds) > TREES_OF_A_SESSION:
            self.rounds[-1 - TREES_OF_A_SESSION] = self.rounds[-1 - TREES_OF_A_SESSION]._replace(tree=None)
        if len(self.rounds) <= most:
            return 1
        self._before = self.rounds.popleft().drafted
        self.forgotten += 1
        return 0

    def shares(self) -> Iterator[tuple[RoundRecord, list[SourceShare]]]:
        """Each round that is kept, with the drafts of each source: offered, admitted and accepted."""
        before = self._before
        for record in tuple(self.rounds):
            yield record, _shares(record, before)
            before = record.drafted


class RoundLog:
    """The logs of a worker's sessions, by session and epoch.

    Args:
        most: how many rounds are kept over all sessions.
        most_of_a_session: how many rounds of one session are kept.
    """

    def __init__(self, most: int = MOST_ROUNDS, most_of_a_session: int = MOST_OF_A_SESSION) -> None:
        self._most = most
        self._most_of_a_session = most_of_a_session
        self._logs: OrderedDict[tuple[SessionKey, int], SessionLog] = OrderedDict()
        self._rounds = 0

    def open(self, log: SessionLog) -> None:
        """Adds the log of a session that begins; an existing log of the same session and epoch is kept."""
        self._logs.setdefault((log.key, log.epoch), log)
        self._shrink()

    def add(
        self,
        key: SessionKey,
        epoch: int,
        record: RoundRecord | None,
        source_names: tuple[str, ...],
        finished: FinishReason | None,
    ) -> None:
        """Adds a round or the end of a session; does nothing where the session's log was dropped."""
        log = self._logs.get((key, epoch))
        if log is None:
            return
        log.source_names = source_names
        if record is not None:
            self._rounds += log.add(record, self._most_of_a_session)
        if finished is not None:
            log.finished = finished
            self._logs.move_to_end((key, epoch))
        if self._rounds > self._most:
            self._shrink()

    def find(self, key: SessionKey) -> list[SessionLog]:
        """All logs of a session, the latest epoch last."""
        found = [log for log in self._logs.values() if log.key == key]
        return sorted(found, key=lambda log: log.epoch)

    def __len__(self) -> int:
        """How many rounds are kept."""
        return self._rounds

    def _shrink(self) -> None:
        """Drops whole logs: those of the sessions that ended longest ago, then those opened longest ago."""
        while self._rounds > self._most or len(self._logs) > self._most:
            oldest = islice(self._logs.items(), self._most_of_a_session)
            name = next((name for name, log in oldest if log.finished is not None), None)
            log = self._logs.pop(next(iter(self._logs)) if name is None else name)
            self._rounds -= len(log.rounds)


def _shares(record: RoundRecord, before: Mapping[int, int]) -> list[SourceShare]:
    admitted, accepted = Counter(record.admitted), Counter(record.token_sources)
    shares = [
        SourceShare(source, _since(count, before.get(source, 0)), admitted[source], accepted[source])
        for source, count in sorted(record.drafted.items())
    ]
    return [share for share in shares if any(share[1:])]


def _since(count: int, before: int) -> int:
    """How much a count grew; a session that was parked counts from 0 again."""
    return count - before if count >= before else count
