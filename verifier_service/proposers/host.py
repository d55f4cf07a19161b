"""The batched proposers of this worker as the engine calls them: one that fails or dawdles is muted.

Whatever a proposer does, the sessions go on: nothing that a proposer returns is more than a draft, and no
error of a proposer reaches a session. The engine's thread waits for each call, so calls are timed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from torch import Tensor

from outrider.wire.status import peer_text
from speculative.draft import Draft
from speculative.errors import MalformedDraft
from verifier_service.engine.draft_budget import StepYield
from verifier_service.engine.messages import SwapProposer
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool
from verifier_service.engine.stats import CountsByName
from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    SeenPass,
    all_needs,
)
from verifier_service.proposers.growing import GrowingDraft
from verifier_service.proposers.hosted import HostedProposer, with_own_planes
from verifier_service.proposers.planes.filling import PlaneFilling
from verifier_service.proposers.planes.held_passes import Seen, ShownPasses
from verifier_service.proposers.price import ProposerPrice, ProposerPrices
from verifier_service.proposers.quiet_steps import Present, QuietSteps

log = logging.getLogger(__name__)

STUCK_S = 1.0
"""A single call that takes longer, in seconds, mutes a proposer."""
WARM_STEPS = 8
"""Steps before the end of a rest in which a proposer without planes is shown passes again: it has to know the
text when it is tried."""

COMPARED_STEPS = 32
"""Steps before the end of a rest that the steps with the proposer are compared with."""


class ProposerHost:
    """Calls the batched proposers of this worker, and stops calling one that does harm.

    Args:
        proposers: by source name.
        sessions: all sessions of the worker.
        counts: of drafted nodes, by source name.
        now_s: seconds for which the process ran (see `AwakeClock`); constant where nothing is measured.

    Raises ValueError where the target's pool lacks the planes that the proposers need.
    """

    def __init__(
        self,
        proposers: Mapping[str, BatchedProposer],
        sessions: SessionPool,
        counts: CountsByName,
        now_s: Callable[[], float],
    ) -> None:
        self.muted: dict[str, str] = {}
        """Why a proposer is no longer called, by source name."""
        self.names = tuple(proposers)
        """Source names of all proposers."""
        self.swaps = 0
        """Number of proposers that took the place of others."""
        self.swapping_s = 0.0
        """Seconds for which that held passes up."""
        needs = all_needs(proposers.values())
        self._kept_layers = needs.layers
        self._scout_ids = needs.scout_ids
        self._hosted = with_own_planes(proposers, sessions.kv.pool)
        self._filling: PlaneFilling | None = None
        if needs.planes:
            self._filling = PlaneFilling(sessions, len(needs.layers), self._show_planes)
        self._by_name = {hosted.name: hosted for hosted in self._hosted}
        self._live = self._hosted
        """Those that are not muted."""
        self._live_with_planes = [hosted for hosted in self._hosted if hosted.planes is not None]
        self._sessions = sessions
        self._counts = counts
        self._present = Present([], [], [])
        self._look_away: list[bool] = []
        """For each proposer, when `_present` was noted."""
        self._quiet = QuietSteps()
        self.shows_nothing = False
        """Whether no proposer is shown the step: all rest for long, and the step is quiet."""
        self._step: list[tuple[ProposerPrice, int, bool]] = []
        """For each proposer of the step: its price, the sessions it could draft for, whether it was asked."""
        self.now_s = now_s
        """Seconds for which the process ran: a process that stood still is no fault of a proposer."""

    @property
    def has_planes(self) -> bool:
        """Whether a proposer keeps keys and values in the pool, whose slots passes commit."""
        return bool(self._live_with_planes)

    def resting(self, name: str) -> dict[str, bool]:
        """Whether steps leave out a proposer because its drafts do not pay for its time.

        By the kinds of steps that there were: "greedy", "sampled".
        """
        hosted = self._by_name[name]
        waits = hosted.planes is not None and self._skips_planes
        return {sampling: rests or waits for sampling, rests in hosted.prices.resting.items()}

    def spent_s(self, name: str) -> float:
        """Seconds that calls to a proposer took so far."""
        return self._by_name[name].spent_s

    def attend(self, ready: Sequence[Session]) -> None:
        """Tells the proposers which sessions have begun and which are over."""
        present = Present(list(self._sessions), list(ready), [session.sources.batched for session in ready])
        is_quiet = self._quiet.begin_step(is_same=present == self._present)
        if is_quiet and self.shows_nothing:
            return  # quiet steps are alike
        live = self._live
        if self._filling is not None:
            with_planes, is_filled = self._live_with_planes, self._filling.is_filled
            may_hold = is_quiet or all(hosted.sits or hosted.rests(ready) for hosted in with_planes)
            may_skip = all(hosted.sits_out(ready, is_filled) for hosted in with_planes)
            self._filling.begin(ready, may_hold, may_skip)
        # Steps are quiet only where all proposers without planes look away.
        self.shows_nothing = is_quiet and (self._filling is None or self._filling.skips)
        if is_quiet:
            return
        for hosted in live:
            rests = hosted.sits or hosted.prices.rest_left > WARM_STEPS
            hosted.looks_away = hosted.planes is None and rests
        self._plan_quiet_steps(ready)
        look_away = [hosted.looks_away for hosted in live]
        if present == self._present and look_away == self._look_away:
            return  # as in most steps
        self._present, self._look_away = present, look_away
        for hosted in live:
            with _Call(self, hosted):
                for handle, session in list(hosted.sessions.items()):
                    if self._sessions.get(handle) is not session:
                        del hosted.sessions[handle]
                        hosted.proposer.close(handle)
                for session in ready:
                    self._meet(hosted, session)

    def _plan_quiet_steps(self, ready: Sequence[Session]) -> None:
        """Makes the next steps quiet if all proposers of these sessions rest and need not be shown them."""
        greedy, resting = all(session.greedy for session in ready), []
        for hosted in self._live:
            sessions, price = len(hosted.naming(ready)), hosted.prices.known(greedy)
            if not sessions or (hosted.planes is not None and self._skips_planes and not hosted.rests(ready)):
                continue  # one that is awake waits for a session that is filled
            if price is None or not price.rests or not (hosted.looks_away or hosted.planes is not None):
                return
            price.bound_rest(sessions)
            resting.append(price)
        self._quiet.plan(resting, COMPARED_STEPS)

    @property
    def _skips_planes(self) -> bool:
        """Whether no proposer with planes is expected to draft in this step."""
        return self._filling is not None and self._filling.skips

    def rest_on(self, drafting: int) -> bool:
        """Whether a step asks no proposer because all rest on; counts the step.

        `drafting` is the number of sessions that could draft. Call this once in each step that has some.
        """
        if drafting != len(self._present.ready):
            self._quiet.end()  # the others may be what made it a sampled step
        return self._quiet.has_step()

    def draft(self, ready: Sequence[Session], expected: StepYield) -> None:
        """Has the proposers draft for sessions whose next pass commits.

        `expected` is what the step yields as it stands: no level is computed that is expected to gain fewer
        tokens for its time and for the rows of its nodes.
        """
        self._step.clear()
        is_trying = False
        greedy = all(session.greedy for session in ready)
        awake = []
        for hosted in self._live:
            sessions = len(hosted.naming(ready))
            if not sessions:
                continue
            price = hosted.prices.of(greedy)
            if not price.rests and hosted.planes is not None and self._skips_planes:
                continue  # the proposer waits for a session that is filled
            if not price.rests:
                awake.append((hosted, price))
                continue
            hosted.sits = False
            price.begins(sessions, expected.tokens_per_ms)
            if WARM_STEPS <= price.rest_left < COMPARED_STEPS:
                self._step.append((price, sessions, False))
        if not awake:
            return
        if self._filling is not None and any(hosted.planes and not hosted.sits for hosted, _ in awake):
            self._filling.catch_up()  # which may mute a proposer
            awake = [(hosted, price) for hosted, price in awake if hosted.name not in self.muted]
        # What a proposer adds to the drafts of those before it is its gain: the cheapest drafts come first.
        for hosted, price in sorted(awake, key=lambda each: -each[1].gain_per_ms(len(ready))):
            known = [each for each in hosted.naming(ready) if hosted.sessions.get(each.handle) is each]
            sat = hosted.sits and price.measured.goes_on_without(len(known))
            if sat or hosted.planes is None:
                asked = known
            else:
                asked = [session for session in known if self._feature(session) is not None]
            if not asked:
                continue
            sources = [session.sources for session in asked]
            price.own = fmean([each.share(each.batched[hosted.name]) for each in sources])
            # One trial at a time: if two coincided, each would be blamed for the other's time.
            may_try, is_tried = not (is_trying and expected.tokens_per_ms), price.is_tried
            begins = price.begins(len(asked), expected.tokens_per_ms, may_try)
            is_trying |= is_tried
            if begins or sat:
                self._step.append((price, len(asked), begins))
            hosted.sits = not begins and price.measured.goes_on_without(len(asked))
            if begins:
                growing = [GrowingDraft(expected.row_worth) for _ in asked]
                self._grow(hosted, price, asked, growing, expected.tokens_per_ms)
                self._offer(hosted, asked, growing)

    def saw(self, seen: Seen, features: Tensor | None) -> None:
        """Shows the proposers what a pass did for the sessions that it told them of.

        A proposer that rests, and has no planes, is shown nothing until its rest is nearly over. Where all
        proposers with planes rest, they are shown several passes in one piece, or nothing (`PlaneFilling`).
        """
        for hosted in self._live:
            if hosted.planes is None:
                self._show(hosted, ShownPasses(seen, features, 1))
        if self._filling is not None:
            self._filling.saw(seen, features)

    def missed(self, session: Session, first: int, end: int) -> None:
        """Notes that the proposers are not shown a session's positions `first` to `end - 1`.

        Call this in place of `saw` in a step that `shows_nothing`, while the session has its blocks.
        """
        if self._filling is not None:
            self._filling.missed(session, first, end)

    def stepped(self, tokens: int, ms: float) -> None:
        """Notes that the step has committed `tokens` tokens in `ms`; 0 ms: the step cannot be compared."""
        for price, sessions, asked in self._step if ms > 0 else ():
            price.measured.learn(sessions, asked, tokens, ms)
        self._step.clear()

    def swap(self, swap: SwapProposer) -> None:
        """Carries a swap out, unless it was cancelled. Call this between two passes.

        Raises any error but ValueError; the swap gets either.
        """
        if not swap.before.set_running_or_notify_cancel():
            return
        try:
            before = self.replace(swap.name, swap.proposer)
        except ValueError as error:
            swap.before.set_exception(error)
        except BaseException as error:  # ends the engine, and whoever awaits the swap must not wait for ever
            swap.before.set_exception(error)
            raise
        else:
            swap.before.set_result(before)

    def replace(self, name: str, proposer: BatchedProposer) -> BatchedProposer:
        """Has another proposer draft from the next pass on; returns the one before.

        What the proposer before wrote into planes says nothing to this one. So where there are planes,
        sessions that run are drafted for no more, and cached prefixes are forgotten: those of the proposer's
        own tenant, if it has one.

        Raises ValueError, with nothing changed, for a proposer of other needs and in place of a muted one.
        """
        hosted = self._by_name[name]
        if name in self.muted:
            raise ValueError(f"{name} is muted, so nothing takes its place: {self.muted[name]}")
        if proposer.needs != hosted.proposer.needs:
            raise ValueError(f"{name} has other needs than what would take its place")
        began_s = self.now_s()
        before, hosted.proposer = hosted.proposer, proposer
        hosted.sessions, hosted.prices, hosted.sits = {}, ProposerPrices(), False
        hosted.slow_calls.clear()
        if hosted.planes is not None and self._filling is not None:
            self._sessions.kv.forget(proposer.needs.tenant)
            self._filling.begin_anew(proposer.needs.tenant)
        # The next step tells the proposer of all sessions.
        self._quiet.end()
        self._present = Present([], [], [])
        self.swaps += 1
        self.swapping_s += max(0.0, self.now_s() - began_s)
        return before

    def mute(self, name: str, why: str) -> None:
        """Stops calling a proposer; its drafts so far stay what they are, drafts."""
        if name in self.muted:
            return  # what was drafted before the fault is merged after it, and may be at fault as well
        self.muted[name] = why
        self._live = [hosted for hosted in self._live if hosted.name != name]
        self._live_with_planes = [hosted for hosted in self._live if hosted.planes is not None]
        if self._filling is not None and not self._live_with_planes:
            self._filling.close()
            self._filling = None
        log.error("proposer muted: %s", peer_text(why), extra={"fields": {"source": name}})

    def _show_planes(self, piece: ShownPasses) -> None:
        for hosted in self._live_with_planes:
            self._show(hosted, piece)

    def _show(self, hosted: HostedProposer, piece: ShownPasses) -> None:
        if hosted.looks_away:
            return
        needs = hosted.proposer.needs
        every = needs.prompts or hosted.planes is not None
        rounds = [
            shown._replace(before=self._layers(shown.before, needs.layers))
            for session, shown in piece.seen
            if hosted.sessions.get(session.handle) is session and (shown.tokens or every)
        ]
        if rounds:
            with _Call(self, hosted) as call:
                hosted.proposer.saw(SeenPass(tuple(rounds), self._layers(piece.features, needs.layers)))
            if piece.passes == 1:  # several in one piece take less time than each alone would
                hosted.prices.saw(call.ms, len(rounds))

    def _layers(self, features: Tensor | None, layers: Sequence[int]) -> Tensor | None:
        """The hidden states of one proposer's layers, the first dimension, out of those of all."""
        if features is None or not layers:
            return None
        if tuple(layers) == self._kept_layers:
            return features
        return features[[self._kept_layers.index(layer) for layer in layers]]

    def _meet(self, hosted: HostedProposer, session: Session) -> None:
        """Opens a session that names the proposer, or whose blocks the proposer has to fill."""
        source_index = session.sources.batched.get(hosted.name)
        if source_index is not None and hosted.proposer.needs.tops:
            session.sources.want_tops(source_index, 0 if hosted.looks_away else hosted.proposer.needs.tops)
        if session.handle not in hosted.sessions and (source_index is not None or hosted.fills(session)):
            hosted.sessions[session.handle] = session
            hosted.proposer.open(replace(session.proposed(), planes=hosted.planes))

    def _feature(self, session: Session) -> Tensor | None:
        return None if self._filling is None else self._filling.feature(session)

    def _ask(self, hosted: HostedProposer, session: Session) -> DraftAsk:
        if hosted.planes is None:
            return DraftAsk(session.handle, session.node_limit)
        runs = self._sessions.kv.runs(session, 0, session.cached)
        before = self._layers(self._feature(session), hosted.proposer.needs.layers)
        return DraftAsk(session.handle, session.node_limit, runs, before)

    def _grow(
        self,
        hosted: HostedProposer,
        price: ProposerPrice,
        asked: Sequence[Session],
        growing: Sequence[GrowingDraft],
        tokens_per_ms: float,
    ) -> None:
        """Grows the drafts of these sessions as deep as they pay; what was grown before a fault counts."""
        gain: float | None = None
        level = 0
        with _Call(self, hosted):
            levels = hosted.proposer.draft([self._ask(hosted, session) for session in asked])
        while hosted.name not in self.muted:
            if level and not price.deepens(level, len(asked), tokens_per_ms, gain):
                break
            found: Sequence[DraftLevel | None] | None = None
            with _Call(self, hosted) as call:
                found = next(levels, None)
                gain = self._add(hosted, found or (), asked, growing)
            if not found:
                break
            price.computed(level, call.ms, gain or 0.0, len(asked))
            level += 1

    def _add(
        self,
        hosted: HostedProposer,
        found: Sequence[DraftLevel | None],
        asked: Sequence[Session],
        growing: Sequence[GrowingDraft],
    ) -> float:
        """Adds one level to the drafts; returns the tokens it gains over all sessions, net of its rows."""
        if found and len(found) != len(asked):
            raise MalformedDraft(f"a level has {len(found)} entries for {len(asked)} sessions")
        return sum(
            draft.add(level, session, session.sources.batched[hosted.name])
            for draft, level, session in zip(growing, found, asked, strict=False)
            if level is not None
        )

    def _offer(
        self, hosted: HostedProposer, asked: Sequence[Session], growing: Sequence[GrowingDraft]
    ) -> None:
        with _Call(self, hosted):
            for session, draft in zip(asked, growing, strict=True):
                if draft.tokens:
                    nodes = Draft(tuple(draft.tokens), tuple(draft.parents), tuple(draft.survival))
                    source_index = session.sources.batched[hosted.name]
                    if (kept := session.sources.cut(source_index, nodes)) is not None:
                        fragment, offer = session.propose(source_index, kept)
                        self._counts[hosted.name].offer(len(fragment), offer)
                if draft.scouts is not None:
                    session.want_scouts(draft.scouts, self._scout_ids)


class _Call:
    """The context of calls to a proposer: errors in it mute the proposer, and so does taking too long."""

    __slots__ = ("_began_s", "_host", "_hosted", "ms")

    def __init__(self, host: ProposerHost, hosted: HostedProposer) -> None:
        self._host = host
        self._hosted = hosted
        self._began_s = 0.0
        self.ms = 0.0
        """How long the call took, in ms."""

    def __enter__(self) -> "_Call":
        self._began_s = self._host.now_s()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        took_s = max(0.0, self._host.now_s() - self._began_s)
        self.ms = took_s * 1000
        hosted = self._hosted
        hosted.spent_s += took_s
        if isinstance(error, Exception):
            log.debug("a proposer failed", exc_info=error, extra={"fields": {"source": hosted.name}})
            self._host.mute(hosted.name, f"{type(error).__name__}: {error}")
            return True
        if took_s > STUCK_S or hosted.is_slow(took_s):
            self._host.mute(hosted.name, f"a call took {took_s:.2f} s, and the engine waits for each")
        return False
