"""Chooses how a session uses its device, by milliseconds per token and a preference.

The latency model predicts what each mode costs. A mode's pace begins as the prediction, and each token in the
mode counts for more than the prediction. What was measured corrects later predictions, also those of later
requests; `trials` bounds what wrong predictions may cost.

Pure: knows nothing of clocks, models and sockets.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from outrider.edge.latency_model import (
    Conditions,
    Mode,
    ModeCost,
    best_window,
    first_loss_ms,
    predict,
    window_of_a_pass,
    windows_in_flight,
)
from outrider.edge.measurements import Measurements, TokenPace
from outrider.edge.trials import ModeTrials

WINDOW = 8
"""Most tokens of a window; a message of 8 ids is at most 60 bytes."""
QUICK_WINDOW = 4
"""Tokens of a window where time counts more than passes, until the pace of both sides is known."""
MOST_AHEAD = 64
"""The most tokens on their way at a time."""
EVERY = 32
"""Tokens between two decisions."""
PROBE = 12
"""Tokens that the cloud first decodes alone, so that the controller can measure the cloud's pace."""
HYSTERESIS = 0.9
"""Passes of another mode, as a share of the present mode's, below which a change pays; also the share of the
time that the preference allows below which a mode that makes the target wait is worth a trial."""
FASTER = 0.97
"""Time per token of another mode that was measured, as a share of the present mode's, below which a
change pays where time counts."""
PROMISE = 0.99
"""Time per token that hints have to promise, as a share of the cloud's own, to be worth the device's work."""
EXPECTED = 16.0
"""Tokens for which the expected pace of a mode counts when the mode begins."""
OPENING = 4.0
"""The same for the mode that a session begins with: the text may be unlike earlier texts."""


class Preference(StrEnum):
    """The user's preference for how the device is used."""

    LATENCY = "latency"
    """The fewest milliseconds per token."""
    BALANCED = "balanced"
    """The fewest passes of the target, without being slower than the cloud alone."""
    ECONOMY = "economy"
    """The fewest passes of the target, at up to four times the cloud's time per token, or at up to
    `READABLE_MS` where that is more."""


_SLOWER = {Preference.LATENCY: 1.0, Preference.BALANCED: 1.0, Preference.ECONOMY: 4.0}
"""Time per token that a mode may take, as a multiple of the cloud's own, by preference."""
READABLE_MS = 100.0
"""Time per token that `economy` may always take: 10 tokens a second are about twice what people read."""
TOLERANCE = 1.03
"""Tolerance on that bound before a mode is left, because measured paces are inexact."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a session uses its device from now on."""

    mode: Mode
    window: int
    """Tokens of one window; in CLOUD, tokens that are drafted without being sent, to measure acceptance."""
    in_flight: int
    """Windows that may be on their way at a time."""
    wait_ms: int
    """Milliseconds that the target may wait for a window; 0: the target never waits."""
    why: str
    """The reason, in words, with the numbers."""


class Controller:
    """Decides for one session; `measurements` may be shared with other sessions of the same server.

    Args:
        preference: the user's preference between time and passes.
        enabled: whether the device may draft; False saves battery power and network traffic.
        fixed: the mode to keep, for measurements; None: the controller chooses.
        trials: what trials of modes have shown in earlier requests of the same preference; None: nothing.
    """

    def __init__(
        self,
        preference: Preference,
        measurements: Measurements,
        *,
        enabled: bool = True,
        fixed: Mode | None = None,
        trials: ModeTrials | None = None,
        most_wait_ms: int = 2_000,
    ) -> None:
        self.preference = preference
        self.measurements = measurements
        self.enabled = enabled
        """Whether the device may draft; read with the next tokens, so that any thread may set it."""
        self._was_enabled = enabled
        self.history: list[tuple[int, Decision]] = []
        """Each decision that changed the mode, with the number of tokens before it."""
        self._fixed = fixed
        self._most_wait_ms = most_wait_ms
        self._trials = trials or ModeTrials()
        self._trials.begin()
        self._own, self._rounds = self._remembered()  # of the target alone, the latter per message
        self._pace = TokenPace()  # of the present mode, where the device drafts
        self._measured: dict[Mode, float] = {}
        self._tokens = self._since = 0
        self._due = PROBE
        self.decision = Decision(Mode.CLOUD, 0, 0, 0, "")
        self._take(self._first())
        self.history = [(0, self.decision)]

    def committed(self, tokens: int, took_ms: float) -> Decision:
        """Takes tokens that came together and the time since the tokens before; returns the decision."""
        self._tokens += tokens
        self._time(tokens, took_ms)
        if self.enabled is not self._was_enabled or self._tokens >= self._due or self._is_too_slow():
            self._due = self._tokens + EVERY
            self._was_enabled = self.enabled
            fixed = self._fixed is not None
            self._take(self._first() if fixed or not self.enabled else self._chosen())
        return self.decision

    def explain(self) -> dict[str, object]:
        """The present decision with its reason, the measurements, and the expected cost of each mode."""
        at = self._conditions()
        predictions = {} if at is None else self._predictions(at)
        measured = dict(self._measured)
        if (pace := self._present_pace.ms_per_token) is not None:
            measured[self.decision.mode] = pace
        return {
            "mode": self.decision.mode.value,
            "why": self.decision.why,
            "preference": self.preference.value,
            "rtt_ms": self.measurements.rtt.mean,
            "jitter_ms": self.measurements.jitter.mean,
            "acceptance": self.measurements.acceptance,
            "draft_ms": self.measurements.draft.mean,
            "predicted_ms_per_token": {mode.value: one.ms_per_token for mode, one in predictions.items()},
            "measured_ms_per_token": {mode.value: ms for mode, ms in measured.items()},
            "changes": [(token, decision.mode.value) for token, decision in self.history],
        }

    def _first(self) -> Decision:
        if not self.enabled:
            return Decision(Mode.CLOUD, 0, 0, 0, "drafting is off on request")
        if self._fixed is not None:
            return self._decision(self._fixed, self._conditions(), f"{self._fixed} was asked for")
        if (at := self._conditions()) is None:
            return self._unused(f"measures the cloud's own pace for {PROBE} tokens")
        return self._opening(at) if self.preference is Preference.LATENCY else self._chosen()

    def _opening(self, at: Conditions) -> Decision:
        """Begins with hints where these may be used: they cost no time, and show the pace to beat."""
        found = self._predictions(at)
        costs = self._costs(found)
        best = Mode.HINTING if self._may_hint(found) else Mode.CLOUD
        self._pace = TokenPace.expected(costs[best], OPENING)
        return self._decision(best, at, self._reason(best, at, costs))

    def _remembered(self) -> tuple[TokenPace, TokenPace]:
        """The cloud's pace, by token and by message, with which the session begins.

        For `economy` the last known pace is exact enough, so the target computes no passes just to be
        measured. For `latency` a recent pace is exact enough, because a session begins with hints. For
        `balanced` each session measures the pace anew.
        """
        seen, knows = self.measurements, self.preference is Preference.ECONOMY
        if self.preference is Preference.LATENCY:
            knows = self._trials.knows_cloud(seen.cloud_ms or 0.0, PROBE)
        if not knows or seen.cloud_ms is None or seen.pass_ms is None:
            return TokenPace(), TokenPace()
        return TokenPace.expected(seen.cloud_ms, PROBE), TokenPace.expected(seen.pass_ms, PROBE)

    def _unused(self, why: str) -> Decision:
        """Leaves the decoding to the cloud; now and then the device drafts, to measure."""
        return Decision(Mode.CLOUD, WINDOW if self._trials.takes_measurement() else 0, 0, 0, why)

    def _time(self, tokens: int, took_ms: float) -> None:
        """Adds the time of tokens to the present mode's pace, and to what trials have lost."""
        mode, lost_ms = self.decision.mode, 0.0
        bound_ms = self._bound_ms()
        self._present_pace.add(took_ms, tokens)
        if mode is Mode.CLOUD:
            self._rounds.add(took_ms, 1)
            self.measurements.cloud_ms = self._own.ms_per_token
            self.measurements.pass_ms = self._rounds.ms_per_token
            self._trials.measured_cloud()
        elif bound_ms:
            lost_ms = took_ms - bound_ms * tokens
            self._trials.device_pace.add(took_ms, tokens)
            if mode is Mode.HINTING:
                self._trials.hinted(lost_ms, bound_ms)
        self._trials.committed(tokens, lost_ms, bound_ms)

    @property
    def _present_pace(self) -> TokenPace:
        return self._own if self.decision.mode is Mode.CLOUD else self._pace

    def _bound_ms(self) -> float:
        """Milliseconds that a token may take by the preference; 0: not known yet."""
        own = self._own.ms_per_token
        if not own:
            return 0.0
        least_ms = READABLE_MS if self.preference is Preference.ECONOMY else 0.0
        return max(_SLOWER[self.preference] * own, least_ms)

    def _take(self, decision: Decision) -> None:
        if decision.mode is not self.decision.mode:
            self.history.append((self._tokens, decision))
            self._since = self._tokens
            if decision.mode is Mode.CLOUD:
                self._own.forget(0.25)  # so that the cloud's pace of now soon decides
        if decision.mode is not Mode.CLOUD:
            self._trials.used()
        self.decision = decision

    def _conditions(self) -> Conditions | None:
        """The measured conditions; None while a condition is still unknown."""
        seen, own, verify = self.measurements, self._own.ms_per_token, self._rounds.ms_per_token
        if seen.rtt.mean is None or seen.draft.mean is None or own is None or verify is None:
            return None
        least = 1e-3
        verify, own = max(verify, least), max(own, least)
        draft = max(seen.draft.mean, least)
        return Conditions(seen.acceptance, draft, verify, seen.rtt.mean, min(own, verify))

    def _predictions(self, at: Conditions) -> dict[Mode, ModeCost]:
        """The cost of each mode.

        Where time counts, modes that make the target wait are predicted with a careful acceptance: far away a
        wrong draft costs so much that the estimate after a short run of right ones promises too much.
        """
        found = {mode: predict(mode, at, self._window(mode, at)) for mode in Mode}
        if self.preference is Preference.LATENCY:
            careful = replace(at, acceptance=self.measurements.careful_acceptance)
            for mode in (Mode.WAITING, Mode.PIPELINED):
                found[mode] = predict(mode, careful, found[mode].window)
        return found

    def _window(self, mode: Mode, at: Conditions) -> int:
        if self.preference is Preference.ECONOMY:
            return WINDOW
        if mode is Mode.WAITING:
            return best_window(at, WINDOW)
        return window_of_a_pass(at, WINDOW) if self.preference is Preference.LATENCY else WINDOW

    def _chosen(self) -> Decision:
        at = self._conditions()
        if at is None:
            return Decision(Mode.CLOUD, WINDOW, 0, 0, "has not measured the round trip and drafting yet")
        found = self._predictions(at)
        self._note_pace(found)
        now, costs = self.decision.mode, self._costs(found)
        able = [mode for mode in found if self._may(mode, found, costs[mode], at)]
        able = able or [Mode.CLOUD]
        if self.preference is Preference.LATENCY:
            best = min(able, key=lambda mode: (costs[mode], mode is Mode.CLOUD))
            tried = best is not Mode.HINTING and self._trials.has_measured(best)
            share = FASTER if tried else 1.0
            pays = now is Mode.CLOUD or costs[best] <= share * costs[now]
        else:
            rounds = {mode: one.rounds_per_token for mode, one in found.items()}
            best = min(able, key=lambda mode: (rounds[mode], costs[mode]))
            pays = rounds[best] <= HYSTERESIS * rounds[now]
        if now in able and not pays:
            best = now
        if best is not now:
            self._pace = TokenPace.expected(costs[best], EXPECTED)
        return self._decision(best, at, self._reason(best, at, costs))

    def _may(self, mode: Mode, found: dict[Mode, ModeCost], cost: float, at: Conditions) -> bool:
        """Whether a mode is fast enough, does not rest, and could not lose more than trials may."""
        if mode is Mode.HINTING:
            return self._may_hint(found)
        bound_ms = self._bound_ms()
        if self._trials.is_resting(mode):
            return False
        if mode in (self.decision.mode, Mode.CLOUD):
            return cost <= bound_ms
        if cost > HYSTERESIS * bound_ms:
            return False
        return first_loss_ms(mode, at, found[mode].window) <= self._trials.left_ms(bound_ms)

    def _may_hint(self, found: dict[Mode, ModeCost]) -> bool:
        """Whether hints may be used: a small gain is enough, because the target never waits for hints."""
        promises = found[Mode.HINTING].ms_per_token <= PROMISE * found[Mode.CLOUD].ms_per_token
        return promises and not self._trials.is_resting(Mode.HINTING)

    def _costs(self, found: dict[Mode, ModeCost]) -> dict[Mode, float]:
        """Milliseconds per token of each mode, by all that was predicted and measured."""
        costs = {mode: self._trials.corrected(mode, one.ms_per_token) for mode, one in found.items()}
        own = costs[Mode.CLOUD] = self._own.ms_per_token or costs[Mode.CLOUD]
        costs[Mode.HINTING] = min(costs[Mode.HINTING], own)
        return costs

    def _note_pace(self, found: dict[Mode, ModeCost]) -> None:
        """Corrects the prediction for the present mode by its pace."""
        mode, measured = self.decision.mode, self._present_pace.ms_per_token
        if measured is None:
            return
        self._measured[mode] = measured
        if mode is not Mode.CLOUD and not self._trials.is_resting(mode):
            self._trials.measured(mode, measured, found[mode].ms_per_token)

    def _is_too_slow(self) -> bool:
        """Whether the present mode proved slower than allowed; such a mode rests."""
        mode, measured = self.decision.mode, self._pace.ms_per_token
        bound_ms = self._bound_ms()
        if self._fixed is not None or mode is Mode.CLOUD or not bound_ms or measured is None:
            return False
        if mode is Mode.HINTING:  # what hints gain comes in rare long runs, so the latest tokens say little
            slow = self._trials.hints_lose(bound_ms)
        else:
            slow = measured > (TOLERANCE if self._trials.left_ms(bound_ms) > 0 else 1.0) * bound_ms
        if slow:
            self._trials.failed(mode, self._tokens - self._since)
        return slow

    def _reason(self, mode: Mode, at: Conditions, costs: dict[Mode, float]) -> str:
        measured = (
            f"round trip {at.rtt_ms:.0f} ms, acceptance {at.acceptance:.2f}, draft {at.draft_ms:.1f} ms, "
            f"pass {at.verify_ms:.1f} ms"
        )
        each = ", ".join(f"{one} {ms:.1f}" for one, ms in costs.items())
        return f"{mode} for {self.preference} at {measured}; ms per token: {each}"

    def _decision(self, mode: Mode, at: Conditions | None, why: str) -> Decision:
        if mode is Mode.CLOUD:
            return Decision(mode, 0, 0, 0, why) if self._fixed is mode else self._unused(why)
        window = self._first_window(mode) if at is None else self._window(mode, at)
        if mode is Mode.WAITING:
            return Decision(mode, window, 1, self._wait_ms(at, window), why)
        most = MOST_AHEAD // window
        in_flight = most if at is None else windows_in_flight(at, window, most)
        wait_ms = self._wait_ms(at, window) if mode is Mode.PIPELINED else 0
        return Decision(mode, window, in_flight, wait_ms, why)

    def _first_window(self, mode: Mode) -> int:
        """The window until the conditions are known; a target that waits for each window wants long ones."""
        quick = self.preference is Preference.LATENCY and mode is not Mode.WAITING
        return QUICK_WINDOW if quick else WINDOW

    def _wait_ms(self, at: Conditions | None, window: int) -> int:
        """Milliseconds that a window may need: round trip, pass, drafting, and four times the jitter."""
        if at is None:
            return self._most_wait_ms
        jitter = self.measurements.jitter.mean or 0.0
        needed = at.rtt_ms + at.verify_ms + window * at.draft_ms + 4 * jitter
        return max(1, min(self._most_wait_ms, round(1.25 * needed)))
