"""Predicts what a token costs when a device drafts for a target across a network.

The formulas are those of docs/edge.md, with one device and one target:

- cloud only: the target decodes without the device.
- waiting: the target waits for one window of drafts, verifies the window, and the device drafts the next.
- pipelined: several windows travel at once, and a mismatch discards those behind it.
- hinting: the target never waits. A draft counts only once the device is ahead of the target, which takes a
  correct run of at least rtt / (cloud - draft) tokens.

Pure; times are in milliseconds.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

LONGEST_WINDOW = 32
"""Most tokens of a window that `best_window` considers."""
RESTART = 1.5
"""Passes that a mismatch costs in a pipeline: the pass that finds it, and half of the pass under way."""


class Mode(StrEnum):
    """How a session uses its device."""

    CLOUD = "cloud"
    """The device drafts nothing."""
    HINTING = "hinting"
    """The target takes the drafts that have arrived and never waits for more."""
    WAITING = "waiting"
    """The target waits a bounded time for one window at a time."""
    PIPELINED = "pipelined"
    """The target waits a bounded time for windows, of which several travel at once."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that determine the costs of one session.

    Raises:
        ValueError: a number is out of its range.
    """

    acceptance: float
    """Probability that a drafted token is right if all tokens before it are right; 0 to 1."""
    draft_ms: float
    """Milliseconds in which the device drafts one token; above 0."""
    verify_ms: float
    """Milliseconds of one pass of the target, above 0; the same for one token as for a window."""
    rtt_ms: float
    """Round trip between device and target in milliseconds; 0 or more."""
    cloud_ms: float | None = None
    """Milliseconds per token without the device; None: `verify_ms`, if no other source drafts."""

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance is {self.acceptance}; it must be 0 to 1")
        for name in ("draft_ms", "verify_ms", "cloud_ms"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be a number above 0")
        if not (self.rtt_ms >= 0 and math.isfinite(self.rtt_ms)):
            raise ValueError(f"rtt_ms is {self.rtt_ms}; it must be a number from 0")

    @property
    def own_ms(self) -> float:
        """Milliseconds per token without the device."""
        return self.verify_ms if self.cloud_ms is None else self.cloud_ms


@dataclass(frozen=True, slots=True)
class ModeCost:
    """Expected costs of one mode."""

    ms_per_token: float
    rounds_per_token: float
    """Passes of the target per token; 1 is plain decoding."""
    window: int
    """Tokens of one window of drafts; 0 without drafts."""


def expected_tokens(acceptance: float, window: int) -> float:
    """Tokens that one pass is expected to commit when `window` drafted tokens are verified at once."""
    if acceptance >= 1:
        return window + 1.0
    return float((1 - acceptance ** (window + 1)) / (1 - acceptance))


def predict(mode: Mode, at: Conditions, window: int) -> ModeCost:
    """The costs of a mode with windows of this many tokens, 1 or more."""
    drafted = expected_tokens(at.acceptance, window)
    match mode:
        case Mode.CLOUD:
            return ModeCost(at.own_ms, at.own_ms / at.verify_ms, 0)
        case Mode.WAITING:
            took_ms = window * at.draft_ms + at.rtt_ms + at.verify_ms
            return ModeCost(took_ms / drafted, 1 / drafted, window)
        case Mode.PIPELINED:
            return ModeCost(_pipelined_ms(at, window), 1 / drafted, window)
        case Mode.HINTING:
            took_ms = _hinting_ms(at)
            return ModeCost(took_ms, took_ms / at.verify_ms, window)  # passes follow one another at once


def best_window(at: Conditions, longest: int = LONGEST_WINDOW) -> int:
    """The window with the least time per token if the target waits for one window at a time."""
    return min(range(1, longest + 1), key=lambda window: predict(Mode.WAITING, at, window).ms_per_token)


def break_even_rtt_ms(mode: Mode, at: Conditions, longest: int = LONGEST_WINDOW) -> float:
    """The round trip below which a mode needs less time than the cloud alone; 0 or less: none does.

    Only for WAITING and PIPELINED: hinting is never slower than the cloud alone. Else raises ValueError.
    """
    a, draft, verify = at.acceptance, at.draft_ms, at.verify_ms
    if mode is Mode.WAITING:
        windows = range(1, longest + 1)
        return max(expected_tokens(a, w) * at.own_ms - w * draft - verify for w in windows)
    if mode is Mode.PIPELINED:
        if a >= 1:
            return math.inf if draft < at.own_ms else 0.0
        return (at.own_ms - a * draft) / (1 - a) - RESTART * verify
    raise ValueError(f"mode is {mode}; waiting and pipelined have a break-even")


def window_of_a_pass(at: Conditions, longest: int) -> int:
    """The window that the device drafts during one pass, 2 to `longest`.

    A target that verifies such windows is never idle for want of drafts. Longer ones reach the target late.
    """
    return max(2, min(longest, math.ceil(at.verify_ms / at.draft_ms)))


def first_loss_ms(mode: Mode, at: Conditions, window: int) -> float:
    """Milliseconds that the first mismatch of a mode costs, which a trial has to be able to lose."""
    match mode:
        case Mode.CLOUD:
            return 0.0
        case Mode.HINTING:
            return at.verify_ms  # the target waits for nothing
        case Mode.WAITING:
            return at.rtt_ms + window * at.draft_ms
        case Mode.PIPELINED:
            return at.rtt_ms + window * at.draft_ms + RESTART * at.verify_ms


def windows_in_flight(at: Conditions, window: int, most: int) -> int:
    """Windows on their way at a time that keep the target busy for a round trip; 1 to `most`."""
    return max(1, min(most, 1 + math.ceil((at.rtt_ms + at.verify_ms) / (window * at.draft_ms))))


def _pipelined_ms(at: Conditions, window: int) -> float:
    """Milliseconds per token in a pipeline: the device's pace, or the target's pace if that is slower.

    Behind a mismatch the target waits until a whole window is drafted, its wrong tokens included, or for half
    of the pass under way, whichever ends later.
    """
    pace_ms = max(at.draft_ms, at.verify_ms / window)
    wrong = window + 1 - expected_tokens(at.acceptance, window)
    restart_ms = at.verify_ms + max((RESTART - 1) * at.verify_ms, wrong * at.draft_ms)
    return at.acceptance * pace_ms + (1 - at.acceptance) * (at.rtt_ms + restart_ms)


def _hinting_ms(at: Conditions) -> float:
    """Milliseconds per token with hints: only runs long enough for the device to get ahead save time."""
    gain_ms = at.own_ms - at.draft_ms
    if gain_ms <= 0:
        return at.own_ms
    a = min(at.acceptance, 1 - 1e-9)
    least = math.floor((at.rtt_ms + (RESTART - 1) * at.verify_ms) / gain_ms) + 1
    ahead = a**least  # the probability of a run that long
    length = least + a / (1 - a)  # mean length of such a run
    behind_ms = (a / (1 - a) - ahead * length + 1 - ahead) * at.own_ms
    ahead_ms = ahead * (at.rtt_ms + length * at.draft_ms + RESTART * at.verify_ms)
    return min(at.own_ms, (behind_ms + ahead_ms) * (1 - a))
