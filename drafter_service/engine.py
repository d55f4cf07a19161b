"""The engine: one thread that takes in what the verifiers say, and drafts, one batched pass at a time.

Between two passes everything that has arrived is taken in, so what a verifier commits interrupts growth at
any token; after every pass the new nodes go out at once. With nothing worth drafting it sleeps on its inbox.
Knows nothing of sockets: events come in through `submit`, and whatever goes out is given to `publish`.
"""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import Growth
from drafter_service.drafters import Drafter
from drafter_service.follower import Rows
from drafter_service.roster import Followed, Roster
from outrider.source.events import Broken, End, Event, Follow, Least, NotFollowed, Outgoing, Progress, Wrong
from speculative.errors import EmptySupport, Overloaded

log = logging.getLogger(__name__)

Batch = list[tuple[Followed, Rows]]
PASS_WEIGHT = 0.1
"""Of the latest pass in what is told of their duration."""


@dataclass(slots=True)
class Counts:
    """What the engine has done since it started."""

    passes: int = 0
    rows: int = 0
    nodes_drafted: int = 0
    reroots: int = 0
    nodes_committed: int = 0
    nodes_kept: int = 0
    nodes_dropped: int = 0
    refusals: int = 0
    unknown_aliases: int = 0
    failed_passes: int = 0
    failed_sessions: int = 0


class Engine:
    """Drafts for every followed session.

    Args:
        publish: called in the engine's thread with what goes out, by stream; must not block.
        nodes_per_pass: leaves expanded in one pass, shared by the sessions; each gets at least one.
        chunk: committed ids read in one pass, over all sessions.
    """

    def __init__(
        self,
        drafter: Drafter,
        publish: Callable[[dict[int, Outgoing]], None],
        *,
        growth: Growth,
        nodes_per_pass: int,
        chunk: int,
        grace_s: float,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafter = drafter
        self.counts = Counts()
        self.roster = Roster(drafter, growth, grace_s=grace_s, most=max_sessions)
        self._publish = publish
        self._nodes_per_pass = nodes_per_pass
        self._chunk = chunk
        self._clock = clock
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._outgoing: dict[int, Outgoing] = {}
        self._least: dict[int, float] = {}  # survival that nodes need, by stream
        self._eased: set[int] = set()  # streams where they need less since the last pass
        self.pass_s = 0.0
        """How long passes took lately, in seconds."""
        self._busy = 0  # sessions in the last pass
        self._stopping = False

    def submit(self, event: Event) -> None:
        """Takes an event in, from any thread."""
        self._inbox.put(event)

    def stop(self) -> None:
        """Makes `run` return after the pass in flight, from any thread."""
        self._inbox.put(None)

    def run(self) -> None:
        """The engine's thread: works until `stop`."""
        idle = True
        while not self._stopping:
            self.take_in(wait=idle)
            idle = not self.step()
        self.roster.close()

    def take_in(self, *, wait: bool) -> None:
        """Handles all events that have arrived; if asked to, waits for one or for a kept cache's end."""
        until_s = self.roster.expire(self._clock())
        try:
            if wait:
                timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
                self._handle(self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            pass
        for _ in range(self._inbox.qsize()):  # what comes in meanwhile is for after the next pass
            self._handle(self._inbox.get_nowait())
        self._flush()

    def step(self) -> bool:
        """One pass over all sessions that have something to draft; False where none has."""
        self._release()
        batch = self._plan()
        if not batch:
            self._flush()
            return False
        began = time.perf_counter()
        try:
            logits = self.drafter.forward([(followed.follower.cache, rows) for followed, rows in batch])
        except Overloaded as error:
            # Nothing was computed: what waits makes room, then the session that came last does.
            if not self.roster.free_oldest():
                self._give_up(batch[-1:], str(error))
        except Exception:
            log.exception("a pass over %d sessions failed; they are refused", len(batch))
            self.counts.failed_passes += 1
            self._give_up(batch, "the drafter failed; its log says why")
        else:
            took_s = time.perf_counter() - began
            self.pass_s += (took_s - self.pass_s) * (PASS_WEIGHT if self.pass_s else 1.0)
            self._grow(batch, logits)
        self._flush()
        return True

    def _grow(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        self.counts.passes += 1
        low = 0
        for followed, rows in batch:
            high = low + len(rows.want)
            self.counts.rows += len(rows.tokens)
            try:
                followed.follower.grow(rows, logits[low:high])
                self._send_fragments(followed)
            except EmptySupport as error:
                self._give_up([(followed, rows)], str(error))
            except Exception:
                self._failed(followed)
                self.roster.end(followed)
            low = high

    def _plan(self) -> Batch:
        nodes = max(1, self._nodes_per_pass // max(1, self._busy))
        chunk = self._chunk
        batch: Batch = []
        for followed in self.roster:
            rows = followed.follower.plan(nodes, chunk)
            if rows is not None:
                batch.append((followed, rows))
                # Whoever comes late reads one id a pass at least: nobody starves behind a long prompt.
                chunk = max(1, chunk - len(rows.tokens))
        self._busy = len(batch)
        return batch

    def _give_up(self, batch: Batch, why: str) -> None:
        for followed, _ in batch:
            self._refuse(followed, why)
            self.roster.end(followed)

    def _handle(self, event: Event | None) -> None:
        match event:
            case Progress():
                self._progress(event)
            case Follow():
                self._follow(event)
            case End(stream, alias):
                followed = self.roster.get(stream, alias)
                if followed is None:
                    self.counts.unknown_aliases += 1
                else:
                    self.roster.end(followed)
            case Least(stream, survival):
                self._needs(stream, survival)
            case Broken(stream):
                self.roster.let_go_stream(stream, self._clock())
                self._outgoing.pop(stream, None)
                self._least.pop(stream, None)
            case Wrong():
                self._refuse(event, event.why)
            case None:
                self._stopping = True

    def _needs(self, stream: int, survival: float) -> None:
        before = self._least.get(stream, 0.0)
        if before == survival:
            return
        self._least[stream] = survival
        if survival < before:
            self._eased.add(stream)
        for followed in self.roster:
            if followed.stream == stream:
                followed.follower.needs(survival)

    def _release(self) -> None:
        """What was held back goes out where nodes need less since."""
        if self._eased:
            for followed in self.roster:
                if followed.stream in self._eased:
                    self._send_fragments(followed)
            self._eased.clear()

    def _follow(self, follow: Follow) -> None:
        try:
            followed, before = self.roster.follow(follow, self._clock())
        except (NotFollowed, Overloaded) as error:
            self._refuse(follow, str(error))
            return
        except Exception:
            self._failed(follow)
            return
        followed.follower.needs(self._least.get(follow.stream, 0.0))
        if before is not None:
            self._refuse(before, f"session {follow.key} is followed by someone else since")

    def _progress(self, progress: Progress) -> None:
        followed = self.roster.get(progress.stream, progress.alias)
        if followed is None:
            self.counts.unknown_aliases += 1
            return
        try:
            rerooted = followed.follower.progress(progress.position, progress.ids, progress.prefix_hash)
        except NotFollowed as error:
            self._refuse(followed, str(error))
            self.roster.let_go(followed, self._clock())
            return
        except Exception:
            self._failed(followed)
            self.roster.end(followed)
            return
        self.counts.reroots += 1
        self.counts.nodes_committed += sum(node.sent for node in rerooted.path)
        self.counts.nodes_kept += rerooted.kept
        self.counts.nodes_dropped += rerooted.dropped
        self._send_fragments(followed)

    def _send_fragments(self, followed: Followed) -> None:
        fragments = followed.follower.take_fragments()
        if fragments:
            self.counts.nodes_drafted += sum(map(len, fragments))
            drafts = self._out(followed.stream).drafts
            drafts.extend((followed.alias, fragment) for fragment in fragments)

    def _failed(self, whom: Follow | Followed) -> None:
        """Inside an `except`: the trouble of one session is no other's."""
        log.exception("session %s failed; it is refused", whom.key, extra={"fields": whom.key.fields})
        self.counts.failed_sessions += 1
        self._refuse(whom, "the drafter failed on this session; its log says why")

    def _refuse(self, whom: Follow | Followed | Wrong, message: str) -> None:
        self.counts.refusals += 1
        log.info("not followed: %s", message, extra={"fields": {"stream": whom.stream, "alias": whom.alias}})
        self._out(whom.stream).refusals.append((whom.alias, message))

    def _out(self, stream: int) -> Outgoing:
        return self._outgoing.setdefault(stream, Outgoing())

    def _flush(self) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            self._publish(outgoing)
