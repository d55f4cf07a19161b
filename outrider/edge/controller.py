"""Chooses how a session uses its device, by milliseconds per token and a preference.

A pace that was measured in a mode outweighs the latency model's prediction for the mode: a wrong prediction
costs one trial. Where a mode proves slower than the preference allows, the controller leaves the mode, and
lets the mode rest for twice as many tokens as the time before.

Pure: knows nothing of clocks, models and sockets.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from outrider.edge.latency_model import (
    Conditions,
    Mode,
    ModeCost,
    best_window,
    predict,
    windows_in_flight,
)
from outrider.edge.measurements import Measurements, TokenPace

WINDOW = 8
"""Most tokens of a window; a message of 8 ids is at most 60 bytes."""
MOST_IN_FLIGHT = 8
"""The most windows on their way at a time."""
EVERY = 32
"""Tokens between two decisions."""
PROBE = 12
"""Tokens that the cloud first decodes alone, so that the controller can measure the cloud's pace."""
HYSTERESIS = 0.9
"""Cost of another mode, as a share of the present mode's cost, below which a change pays."""
TRUSTED = 6.0
"""Weighted tokens from which a measured pace outweighs the prediction."""
FIRST_REST = 64
"""Tokens for which a mode rests after it proved too slow; doubled each further time."""
LONGEST_REST = 4096
"""The longest rest of a mode, in tokens."""


class Preference(StrEnum):
    """The user's preference for how the device is used."""

    LATENCY = "latency"
    """The fewest milliseconds per token."""
    BALANCED = "balanced"
    """The fewest passes of the target, without being slower than the cloud alone."""
    ECONOMY = "economy"
    """The fewest passes of the target, at up to four times the cloud's own time per token."""


_SLOWER = {Preference.LATENCY: 1.0, Preference.BALANCED: 1.0, Preference.ECONOMY: 4.0}
"""Time per token that a mode may take, as a multiple of the cloud's own, by preference."""
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
    """

    def __init__(
        self,
        preference: Preference,
        measurements: Measurements,
        *,
        enabled: bool = True,
        fixed: Mode | None = None,
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
        self._paces: defaultdict[Mode, TokenPace] = defaultdict(TokenPace)
        self._rests: dict[Mode, tuple[int, int]] = {}  # until this token; length of the rest
        self._rounds = TokenPace()  # of the target alone: milliseconds per message
        self._tokens = 0
        self._due = PROBE
        self.decision = self._first()
        self.history.append((0, self.decision))

    def committed(self, tokens: int, took_ms: float) -> Decision:
        """Takes tokens that came together and the time since the tokens before; returns the decision."""
        self._tokens += tokens
        self._paces[self.decision.mode].add(took_ms, tokens)
        if self.decision.mode is Mode.CLOUD:
            self._rounds.add(took_ms, 1)
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
        measured = {mode: pace.ms_per_token for mode, pace in self._paces.items()}
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
        return Decision(Mode.CLOUD, WINDOW, 0, 0, f"measures the cloud's own pace for {PROBE} tokens")

    def _take(self, decision: Decision) -> None:
        if decision.mode is not self.decision.mode:
            self.history.append((self._tokens, decision))
            # Measurements from the old mode now count less than new ones.
            self._paces[decision.mode].forget(0.25)
        self.decision = decision

    def _conditions(self) -> Conditions | None:
        """The measured conditions; None while a condition is still unknown."""
        seen, own = self.measurements, self._paces[Mode.CLOUD].ms_per_token
        verify = self._rounds.ms_per_token
        if seen.rtt.mean is None or seen.draft.mean is None or own is None or verify is None:
            return None
        least = 1e-3
        verify, own = max(verify, least), max(own, least)
        draft = max(seen.draft.mean, least)
        return Conditions(seen.acceptance, draft, verify, seen.rtt.mean, min(own, verify))

    def _predictions(self, at: Conditions) -> dict[Mode, ModeCost]:
        return {mode: predict(mode, at, self._window(mode, at)) for mode in Mode}

    def _window(self, mode: Mode, at: Conditions) -> int:
        if mode is Mode.WAITING:
            return WINDOW if self.preference is Preference.ECONOMY else best_window(at, WINDOW)
        return WINDOW

    def _chosen(self) -> Decision:
        at = self._conditions()
        if at is None:
            return Decision(Mode.CLOUD, WINDOW, 0, 0, "has not measured the round trip and drafting yet")
        found = self._predictions(at)
        costs = {mode: self._cost(mode, one) for mode, one in found.items()}
        bound = _SLOWER[self.preference] * costs[Mode.CLOUD]
        resting = {mode for mode, (until, _) in self._rests.items() if self._tokens < until}
        able = [mode for mode in Mode if mode not in resting and costs[mode] <= bound]
        able = able or [Mode.CLOUD]
        if self.preference is Preference.LATENCY:
            best, cost = min(able, key=lambda mode: costs[mode]), costs
        else:
            cost = {mode: one.rounds_per_token for mode, one in found.items()}
            best = min(able, key=lambda mode: (cost[mode], costs[mode]))
        now = self.decision.mode
        if now in able and cost[best] > HYSTERESIS * cost[now]:
            best = now
        return self._decision(best, at, self._reason(best, at, costs))

    def _cost(self, mode: Mode, predicted: ModeCost) -> float:
        """Milliseconds per token of a mode: measured if there are enough measurements, else predicted."""
        pace = self._paces[mode]
        measured = pace.ms_per_token
        return predicted.ms_per_token if measured is None or pace.tokens < TRUSTED else measured

    def _is_too_slow(self) -> bool:
        """Whether the present mode proved slower than allowed; such a mode rests."""
        mode = self.decision.mode
        pace, own = self._paces[mode], self._paces[Mode.CLOUD].ms_per_token
        measured = pace.ms_per_token
        if self._fixed is not None or mode is Mode.CLOUD or own is None or measured is None:
            return False
        if pace.tokens < TRUSTED or measured <= TOLERANCE * _SLOWER[self.preference] * own:
            return False
        length = min(2 * self._rests.get(mode, (0, FIRST_REST // 2))[1], LONGEST_REST)
        self._rests[mode] = (self._tokens + length, length)
        pace.forget(0.0)
        return True

    def _reason(self, mode: Mode, at: Conditions, costs: dict[Mode, float]) -> str:
        measured = (
            f"round trip {at.rtt_ms:.0f} ms, acceptance {at.acceptance:.2f}, draft {at.draft_ms:.1f} ms, "
            f"pass {at.verify_ms:.1f} ms"
        )
        each = ", ".join(f"{one} {ms:.1f}" for one, ms in costs.items())
        return f"{mode} for {self.preference} at {measured}; ms per token: {each}"

    def _decision(self, mode: Mode, at: Conditions | None, why: str) -> Decision:
        if mode is Mode.CLOUD:
            return Decision(mode, WINDOW if self._fixed is None else 0, 0, 0, why)
        window = WINDOW if at is None else self._window(mode, at)
        if mode is Mode.WAITING:
            return Decision(mode, window, 1, self._wait_ms(at, window), why)
        in_flight = MOST_IN_FLIGHT if at is None else windows_in_flight(at, window, MOST_IN_FLIGHT)
        wait_ms = self._wait_ms(at, window) if mode is Mode.PIPELINED else 0
        return Decision(mode, window, in_flight, wait_ms, why)

    def _wait_ms(self, at: Conditions | None, window: int) -> int:
        """Milliseconds that a window may need: round trip, pass, drafting, and four times the jitter."""
        if at is None:
            return self._most_wait_ms
        jitter = self.measurements.jitter.mean or 0.0
        needed = at.rtt_ms + at.verify_ms + window * at.draft_ms + 4 * jitter
        return max(1, min(self._most_wait_ms, round(1.25 * needed)))
