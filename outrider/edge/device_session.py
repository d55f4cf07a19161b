"""One request on the device: the committed ids, the chain drafted behind them, and the windows on their way.

The chain continues the committed ids by the device's best guesses, token by token. `plan` says which ids the
model reads next, `drafted` takes its answer, `take_window` gives what can be sent, and `commit` moves along
what the target chose: where the two agree the chain goes on, and where they differ it is dropped with every
window behind the difference.

Knows nothing of models, threads, sockets or clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.edge.controller import Decision
from outrider.edge.latency_model import Mode
from outrider.edge.top_k import TopK, TopKDigest
from speculative import hashing
from speculative.errors import Unavailable
from speculative.fragment import Fragment
from speculative.params import SamplingParams
from speculative.ranking import ChildRanker
from speculative.tree import ROOT

SCALE = 0.65
"""Spread of the target's logits around the drafter's, in logits; see `speculative.ranking`."""
LEAST_SURVIVAL = 0.02
"""Probability of a chain below which the chain grows no further: the verifier would not admit more."""
OWN = 1
"""Index of the device's only source name in its fragments."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a device knows about its request; most fields come from `DeviceTerms` in generation.proto."""

    ids: tuple[int, ...]
    """Ids of the prompt and of the part of the answer that the client has."""
    prompt_length: int
    seed: int
    epoch: int
    params: SamplingParams
    vocabulary_size: int
    """Width of the target's logits: drafted ids are below it."""
    limit: int
    """Most tokens of prompt and answer: a device drafts nothing at or past this position."""
    credits: int
    """Nodes that may be sent at first."""
    credits_per_token: int
    """Nodes that may be sent for each committed token."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end the answer, so that a device drafts nothing behind them."""
    node_limit: int = 255
    """The most nodes on their way at a time."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The model's next call: forget all ids but the first `keep`, then read `ids`."""

    keep: int
    ids: tuple[int, ...]


@dataclass(slots=True)
class DraftingCounts:
    """Counts of a device's drafts for one request."""

    windows: int = 0
    """Windows sent."""
    sent: int = 0
    """Tokens in the windows sent."""
    drafted: int = 0
    """Tokens drafted, sent or not."""
    equal: int = 0
    """Drafted tokens that the target chose as well."""
    wrong: int = 0
    """Drafted tokens in whose place the target chose another token."""


@dataclass(slots=True)
class _Chain:
    """Tokens drafted behind the committed ids; the lists have one entry per token."""

    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)  # of the whole path from the committed ids
    hashes: list[int] = field(default_factory=list)  # over all ids up to and including the token
    sent: int = 0  # tokens in windows on their way
    starts: list[int] = field(default_factory=list)  # of those windows, in the chain


class DeviceSession:
    """Drafts for one request. The terms hold until the request is resumed; then there is a new session.

    Args:
        terms: the server's terms from the start of the request.
        decision: how the session uses the device at first.
        read: ids that the model has read for an earlier session; None: the model has read no ids.

    Attributes:
        read: ids that the model has read.
        counts: counts of the device's drafts so far.
        epoch: the epoch of the session's placement.
        decision: how the session uses the device.
    """

    def __init__(self, terms: Terms, decision: Decision, read: list[int] | None = None) -> None:
        self.counts = DraftingCounts()
        self.epoch = terms.epoch
        self.decision = decision
        self._terms = terms
        self._ids = list(terms.ids)
        self._hash = hashing.prefix_hash(terms.ids)
        self._chain = _Chain()
        self.read = read or []
        self._credits = terms.credits
        self._probe = decision.window
        self._ranker = ChildRanker(
            terms.params,
            terms.seed,
            terms.ids,
            terms.prompt_length,
            width=terms.vocabulary_size,
            bound=terms.vocabulary_size,
            children=1,
            scale=SCALE,
        )

    @property
    def length(self) -> int:
        """Number of committed ids."""
        return len(self._ids)

    @property
    def prefix_hash(self) -> int:
        """Prefix hash over the committed ids."""
        return self._hash

    def decide(self, decision: Decision) -> None:
        """Sets how the device is used from now on."""
        if decision is not self.decision:
            self.decision = decision
            self._probe = decision.window

    def plan(self) -> ModelInput | None:
        """The model's next call; None if there is nothing to draft now."""
        if not self._wants_more():
            return None
        whole = [*self._ids, *self._chain.tokens]
        most = min(len(self.read), len(whole) - 1)  # the last id is read again: what follows it is wanted
        keep = most
        if self.read[:most] != whole[:most]:
            keep = next(at for at in range(most) if self.read[at] != whole[at])
        return ModelInput(keep, tuple(whole[keep:]))

    def drafted(self, reading: ModelInput, top: TopK) -> None:
        """Takes the model's answer to `reading`, which `plan` gave.

        Raises:
            DraftModelFailed: no id of the answer is in the target's vocabulary.
            EmptySupport: the answer leaves no id to rank.
        """
        whole = [*self._ids, *self._chain.tokens]
        self.read = [*self.read[: reading.keep], *reading.ids]
        if self.read != whole:
            return  # tokens were committed meanwhile
        chain = self._chain
        digest = TopKDigest(top, self._terms.vocabulary_size)
        token, share = self._ranker.children(digest, len(whole), chain.tokens)[0]
        chain.hashes.append(hashing.extend(chain.hashes[-1] if chain.hashes else self._hash, token))
        chain.survival.append((chain.survival[-1] if chain.survival else 1.0) * min(1.0, share))
        chain.tokens.append(token)
        self.counts.drafted += 1
        self._probe -= 1

    def failed(self) -> None:
        """Assumes that the model has read nothing, because its state is unknown."""
        self.read = []

    def take_window(self) -> Fragment | None:
        """The next window to send; None if no window is ready."""
        chain, decision = self._chain, self.decision
        if decision.mode is Mode.CLOUD or len(chain.starts) >= max(1, decision.in_flight):
            return None
        low = chain.sent
        room = min(self._credits, self._terms.node_limit - low)
        high = min(len(chain.tokens), low + decision.window, low + room)
        if high <= low or (high - low < decision.window and not self._is_complete(room)):
            return None
        before = chain.survival[low - 1] if low else 1.0
        survival = tuple(share / before for share in chain.survival[low:high])
        self._credits -= high - low
        chain.sent = high
        chain.starts.append(low)
        self.counts.windows += 1
        self.counts.sent += high - low
        return Fragment(
            source=OWN,
            epoch=self.epoch,
            base=len(self._ids) + low,
            prefix_hash=chain.hashes[low - 1] if low else self._hash,
            tokens=tuple(chain.tokens[low:high]),
            parents=tuple(range(ROOT, high - low - 1)),
            survival=survival,
        )

    def commit(self, position: int, ids: Sequence[int], prefix_hash: int = 0, epoch: int = 0) -> None:
        """Moves along ids that the target chose.

        Args:
            position: absolute position of the first id.
            prefix_hash: the target's hash over all ids up to and including these; 0: unknown.
            epoch: the new epoch; 0: the epoch has not changed.

        Raises:
            Unavailable: earlier ids are missing, or the hashes differ; the request can be resumed.
        """
        if position != len(self._ids):
            raise Unavailable(f"ids came for position {position}, but {len(self._ids)} is next")
        if epoch and epoch != self.epoch:
            self.epoch = epoch
            self._unsend()  # windows of the epoch before are stale
        for id_ in ids:
            self._step(id_)
        self._credits += self._terms.credits_per_token * len(ids)
        self._ranker.forget_before(len(self._ids))
        if prefix_hash and prefix_hash != self._hash:
            raise Unavailable(
                f"the hash over {len(self._ids)} ids is {self._hash:#018x} here and {prefix_hash:#018x} there"
            )

    def _step(self, id_: int) -> None:
        chain = self._chain
        if chain.tokens and chain.tokens[0] == id_:
            share = chain.survival[0] or 1.0
            del chain.tokens[0], chain.survival[0], chain.hashes[0]
            chain.survival = [survival / share for survival in chain.survival]
            chain.sent = max(0, chain.sent - 1)
            chain.starts = [max(0, start - 1) for start in chain.starts]
            ends = [*chain.starts[1:], chain.sent]
            chain.starts = [start for start, end in zip(chain.starts, ends, strict=False) if end > start]
            self.counts.equal += 1
        elif chain.tokens:
            self.counts.wrong += 1
            self._chain = _Chain()
        self._ids.append(id_)
        self._hash = hashing.extend(self._hash, id_)
        self._ranker.push(id_)

    def _unsend(self) -> None:
        """Marks all drafts as not sent."""
        self._chain.sent = 0
        self._chain.starts = []

    def _wants_more(self) -> bool:
        chain, decision = self._chain, self.decision
        if decision.mode is Mode.CLOUD:
            return self._probe > 0 and not self._ends(len(chain.tokens))
        most = decision.window * max(1, decision.in_flight)
        return len(chain.tokens) < min(most, self._terms.node_limit) and not self._ends(len(chain.tokens))

    def _ends(self, count: int) -> bool:
        """Whether drafting ends behind the chain's first `count` tokens."""
        chain = self._chain
        if len(self._ids) + count >= self._terms.limit - 1:
            return True  # the last token is the target's own
        if not count:
            return False
        return chain.tokens[count - 1] in self._terms.end_ids or chain.survival[count - 1] < LEAST_SURVIVAL

    def _is_complete(self, room: int) -> bool:
        """Whether to send a short window because no further token follows for now."""
        chain = self._chain
        return self._ends(len(chain.tokens)) or (0 < room <= len(chain.tokens) - chain.sent)
