"""The drafter's worker: drafts for all followed sessions, one batched pass at a time.

Between two passes everything that has arrived is taken in, so what a verifier commits interrupts growth at
any token; after every pass the new nodes go out at once. With nothing worth drafting it sleeps.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_service.block_session import drafting_session
from drafter_service.draft_tree import Growth, Rerooted
from drafter_service.drafters import Drafter
from drafter_service.drawing_session import DrawingSession
from drafter_service.need import DraftingNeed
from drafter_service.session import Cache, DraftingSession, PassRows
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.source.worker import Publish, SourceWorker, WorkerCounts
from speculative.errors import EmptySupport, Overloaded
from speculative.policies.book import PolicyBook
from speculative.policies.names import DEFAULT_POLICY
from speculative.survival_curve import SurvivalCurve
from speculative.window_shape import SHAPES

log = logging.getLogger(__name__)

PassBatch = list[tuple[DraftingSession, PassRows]]
PASS_WEIGHT = 0.1
"""Weight of the latest pass in the announced duration of passes."""
SPARE_SLOTS = 64
"""Cache slots beyond committed ids that a session reserves from the start, for drafted nodes."""
_MEMORY = 2000.0
"""About how many nodes of similar estimates the worker remembers, to correct those of new sessions."""
COUNTERS = {
    "passes": "Forward passes of the model.",
    "rows": "Input tokens of the drafter's forward passes.",
    "reroots": "Commits that moved a draft tree's root.",
    "nodes_committed": "Drafted nodes that the target committed.",
    "nodes_kept": "Nodes still possible after a commit, summed over commits.",
    "nodes_dropped": "Drafted nodes dropped because a commit left their path.",
    "failed_passes": "Passes that failed; their sessions were refused.",
    "swaps": "Swaps of the drafter's weights.",
    "swap_seconds": "Time for which swaps held passes up.",
    "reread_seconds": "Time from swaps until every followed session had read its tokens again.",
    "reread_ids": "Tokens that followed sessions had to read again after swaps.",
}
"""Help texts of the fields of `DrafterCounts`."""
GAUGES = {
    "ids_waiting": "Committed tokens that the model has yet to read.",
    "sessions_kept": "Sessions whose stream broke and whose cache is kept.",
    "kv_slots": "Tokens that caches have room for.",
    "learning_bytes": "Bytes of sessions' text that are kept to learn from and to score with.",
    "weights_version": "Version of the weights that the drafter learnt; 0: the weights it was given.",
    "need": "Drafters that the sessions call for, by the passes that each gets between two commits.",
}
"""Help texts of `DrafterWorker.gauges`."""


@dataclass(slots=True)
class DrafterCounts(WorkerCounts):
    """What the drafter has counted since it started."""

    passes: int = 0
    rows: int = 0
    reroots: int = 0
    nodes_committed: int = 0
    nodes_kept: int = 0
    nodes_dropped: int = 0
    failed_passes: int = 0
    swaps: int = 0
    swap_seconds: float = 0.0
    reread_seconds: float = 0.0
    reread_ids: int = 0


class DrafterWorker(SourceWorker[DraftingSession]):
    """Follows sessions with a small model and grows a draft tree for each.

    Args:
        nodes_per_pass: leaves expanded in one pass, shared by the sessions; each gets at least one.
        chunk: committed ids read in one pass, over all sessions.
        policy: policy of the sessions whose requests name none; see `speculative.policies.names`.
    """

    failure = "the drafter failed on this session; its log says why"
    counts: DrafterCounts

    def __init__(
        self,
        drafter: Drafter,
        profile: SourceProfile,
        publish: Publish,
        *,
        growth: Growth,
        nodes_per_pass: int,
        chunk: int,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(profile, publish, counts=DrafterCounts(), clock=clock)
        self.drafter = drafter
        self._growth = growth
        self._policies = PolicyBook(policy, growth.limits)
        self._curves = {
            greedy: [SurvivalCurve(memory=_MEMORY) for _ in range(1 + len(drafter.abilities.masks))]
            for greedy in (False, True)
        }
        """What the sessions taught about the model's estimates: sampled and greedy ones apart, and those for
        each place of a block."""
        self._nodes_per_pass = nodes_per_pass
        self._chunk = chunk
        self._least: dict[int, float] = {}  # survival that nodes need, by stream
        self._eased: set[int] = set()  # streams whose nodes need less since the last pass
        self._busy = 0  # sessions in the last pass
        self._rereading_since: float | None = None
        self._need = DraftingNeed()

    def open(self, follow: Follow, ids: FollowedIds, kept: DraftingSession | None) -> DraftingSession:
        """Follows a session with a new cache, or with the kept cache of the same session."""
        cache = self._new_cache(len(ids)) if kept is None else kept.cache
        try:
            if kept is not None:
                # The last id must be computed again: its logits are what the tree starts from.
                self.drafter.rewind(cache, min(kept.ids.agreed_length(ids), cache.length, len(ids) - 1))
            if follow.request.criterion in SHAPES:
                return DrawingSession(follow, ids, cache, self.drafter.abilities)
            policy = self._policies.open(follow.request.policy)
            curves = [SurvivalCurve(prior) for prior in self._curves[follow.request.params.greedy]]
            return drafting_session(follow, ids, cache, self.drafter.abilities, self._growth, policy, curves)
        except BaseException:
            self.drafter.close(cache)
            raise

    def opened(self, session: DraftingSession) -> None:
        """Holds back nodes that the session's verifier would hardly admit."""
        session.require(self._least.get(session.stream, 0.0))
        session.passes_before = self.counts.passes
        self._ask_to_wait(session)

    def progressed(self, session: DraftingSession, fresh: Sequence[int]) -> None:
        """Moves the root of the session's tree to the new tokens, and sends the fragments that can go now."""
        rerooted = session.commit(fresh, self.clock() * 1000)
        self.rerooted(session, fresh, rerooted)
        self._need.committed(self.counts.passes - session.passes_before, session.is_sated)
        session.passes_before, session.is_sated = self.counts.passes, False
        self.counts.reroots += 1
        self.counts.nodes_committed += sum(node.sent for node in rerooted.path)
        self.counts.nodes_kept += rerooted.kept
        self.counts.nodes_dropped += rerooted.dropped
        self.send(session, session.take_fragments())
        self._ask_to_wait(session)

    def _ask_to_wait(self, session: DraftingSession) -> None:
        """Asks the verifier to wait for a session's windows; late ones are hardly ever right."""
        if not isinstance(session, DrawingSession):
            return
        if (ms := session.wait_ms(self.step_s)) != session.asked_ms:
            session.asked_ms = self._out(session.stream).waits[session.alias] = ms

    def rerooted(self, session: DraftingSession, fresh: Sequence[int], moved: Rerooted) -> None:
        """Called when a session's tree moved to new tokens."""

    def replace(self, drafter: Drafter, model: str) -> Drafter:
        """Drafts with another drafter of the same sizes from the next pass on; returns the one before.

        Call it between two passes (`call`). Followed sessions go on with empty caches and new trees, and read
        their tokens again in the next passes, as many a pass as `chunk` says. Raises ValueError, with nothing
        changed, for a drafter of another vocabulary or length.

        Args:
            model: what drafts from now on, for people.
        """
        before = self.drafter
        if (drafter.abilities, drafter.tokenizer_digest) != (before.abilities, before.tokenizer_digest):
            raise ValueError(f"{drafter.abilities} cannot take the place of {before.abilities}")
        began = time.perf_counter()
        for session in [*self.roster, *self.roster.kept]:
            before.close(session.cache)
            session.restart(drafter.open(0))
            self.counts.reread_ids += session.unread
        self.drafter = drafter
        self.profile = dataclasses.replace(self.profile, model=model, numerics=drafter.numerics)
        self._rereading_since = began
        self.counts.swaps += 1
        self.counts.swap_seconds += time.perf_counter() - began
        return before

    def leave(self, session: DraftingSession) -> None:
        """Keeps only the committed part of the session's cache."""
        session.cache.drop_nodes()

    def close(self, session: DraftingSession) -> None:
        """Frees the session's cache."""
        self.drafter.close(session.cache)

    def shut_down(self) -> None:
        """Closes every session, then shuts the drafter down."""
        super().shut_down()
        self.drafter.shut_down()

    def least_survival(self, stream: int, survival: float) -> None:
        """Sets the survival below which nodes of a verifier's sessions are held back."""
        before = self._least.get(stream, 0.0)
        if before == survival:
            return
        self._least[stream] = survival
        if survival < before:
            self._eased.add(stream)
        for session in self.roster:
            if session.stream == stream:
                session.require(survival)

    def stream_closed(self, stream: int) -> None:
        """Forgets the least survival of the stream's nodes."""
        self._least.pop(stream, None)

    def gauges(self) -> dict[str, float]:
        """Present values of the drafter's gauges, by metric."""
        return super().gauges() | {
            "ids_waiting": sum(session.unread for session in self.roster),
            "sessions_kept": len(self.roster.kept),
            "kv_slots": self.drafter.cached_tokens,
            "need": self._need.drafters(sum(not session.is_over for session in self.roster)),
        }

    def work(self) -> bool:
        """Runs one pass over all sessions that have something to draft; False if none has."""
        self._send_eased()
        self._note_reread()
        batch = self._plan()
        if not batch:
            self.flush()
            return False
        began = time.perf_counter()
        try:
            logits = self.drafter.forward([(session.cache, rows) for session, rows in batch])
        except Overloaded as error:
            # Nothing was computed. Kept caches make room; if there are none, the session that came last does.
            if not self.roster.free_oldest():
                self.end(batch[-1][0], str(error))
        except Exception:
            log.exception("a pass over %d sessions failed; they are refused", len(batch))
            self.counts.failed_passes += 1
            for session, _ in batch:
                self.end(session, "the drafter failed; its log says why")
        else:
            took_s = time.perf_counter() - began
            self.step_s += (took_s - self.step_s) * (PASS_WEIGHT if self.step_s else 1.0)
            self._grow(batch, logits)
        self.flush()
        return True

    def _plan(self) -> PassBatch:
        nodes = max(1, self._nodes_per_pass // max(1, self._busy))
        chunk = self._chunk
        batch: PassBatch = []
        for session in self.roster:
            rows = session.plan(nodes, chunk)
            if rows is not None:
                batch.append((session, rows))
                # A late session still reads one id a pass: none starves behind a long prompt.
                chunk = max(1, chunk - session.unread)
        self._busy = len(batch)
        return batch

    def _grow(self, batch: PassBatch, logits: NDArray[np.float32]) -> None:
        self.counts.passes += 1
        low = 0
        for session, rows in batch:
            high = low + len(rows.want)
            self.counts.rows += len(rows.tokens)
            try:
                session.grow(rows, logits[low:high])
                self.send(session, session.take_fragments())
            except EmptySupport as error:
                self.end(session, str(error))
            except Exception:
                self.fail(session)
            low = high

    def _note_reread(self) -> None:
        """Counts the time from a swap until every followed session has read its tokens again."""
        if self._rereading_since is not None and not any(session.unread for session in self.roster):
            self.counts.reread_seconds += time.perf_counter() - self._rereading_since
            self._rereading_since = None

    def _send_eased(self) -> None:
        """Sends held-back nodes on the streams whose least survival fell."""
        if self._eased:
            for session in self.roster:
                if session.stream in self._eased:
                    self.send(session, session.take_fragments())
            self._eased.clear()

    def _new_cache(self, length: int) -> Cache:
        """Opens an empty cache; evicts the oldest kept caches if it needs their room."""
        reserve = min(length + SPARE_SLOTS, self.drafter.abilities.max_length)
        while True:
            try:
                return self.drafter.open(reserve)
            except Overloaded:
                if not self.roster.free_oldest():
                    raise
