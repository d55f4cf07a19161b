"""What the trials of a device's modes have shown, over all requests to one server, and what they may cost.

A prediction decides which mode is tried. A trial may fail, so trials have an allowance: the milliseconds that
all modes together may lose against the time that the preference allows. A mode whose first bad rounds would
exceed what is left is not tried, which is why a long round trip makes trials rare. A mode that proves too
slow rests, longer each time.

A device that is not used drafts a little now and then, so that its draft time and acceptance stay known. The
pauses double while the device stays unused, because such drafts cost battery power and serve nothing else.

Pure: knows tokens and milliseconds, no clock.
"""

from dataclasses import dataclass

from outrider.edge.latency_model import Mode
from outrider.edge.measurements import TokenPace

SHARE = 0.03
"""Share of the time that trials may lose."""
HORIZON = 256
"""Tokens whose share the allowance is at first, and the most that good modes add to the allowance."""
FIRST_REST = 64
"""Tokens for which a mode rests after it proved too slow; doubled each further time."""
HINTS_MAY_LOSE = 8
"""Time that hints may lose before they rest, in tokens."""
HINTS_MAY_SAVE = 64
"""Saved time that hints may lose again, at most, in tokens."""
PROBES = 0.02
"""Share of the time that measurements of the cloud's own pace may cost while a device saves time."""
KNOWN = 256
"""Fewest tokens between two measurements of the cloud's own pace."""
LONGEST_REST = 4096
"""The longest rest of a mode, in tokens."""
FIRST_PAUSE = 32
"""Tokens between the first two measurements of an unused device; doubled each further time."""
LONGEST_PAUSE = 128
"""The longest pause between two measurements of an unused device, in tokens."""
FADING = 0.75
"""Share of a correction that is left for the next request: the connection may have changed."""


@dataclass(frozen=True, slots=True)
class ModeRest:
    """A rest of a mode."""

    until: int
    """Number of tokens, over all requests, at which the rest ends."""
    length: int


class ModeTrials:
    """What the modes proved to cost, and what trials may still lose."""

    def __init__(self) -> None:
        self._tokens = 0
        self._lost_ms = 0.0
        self._corrections: dict[Mode, float] = {}
        self._rests: dict[Mode, ModeRest] = {}
        self._pause = FIRST_PAUSE
        self.device_pace = TokenPace()
        """The pace in all modes in which the device drafts."""
        self._hints_lost_ms = 0.0
        self._cloud_at: int | None = None  # number of tokens at which the cloud's own pace was measured last
        self._measure_at = 0  # number of tokens at which an unused device drafts again

    def begin(self) -> None:
        """Notes that another request begins."""
        self._corrections = {mode: by**FADING for mode, by in self._corrections.items()}

    def committed(self, tokens: int, lost_ms: float, bound_ms: float) -> None:
        """Adds tokens and the time that they took beyond `bound_ms` each; below 0: time that they saved."""
        self._tokens += tokens
        self._lost_ms = max(self._lost_ms + lost_ms, -SHARE * bound_ms * HORIZON)

    def measured_cloud(self) -> None:
        """Notes that the cloud's own pace was measured just now."""
        self._cloud_at = self._tokens

    def knows_cloud(self, own_ms: float, probe: int) -> bool:
        """Whether the cloud's own pace is known well enough; if not, `probe` tokens measure the pace anew.

        Args:
            own_ms: the pace that was measured last, in ms per token.
        """
        if self._cloud_at is None:
            return False
        loses = probe * max(0.0, own_ms / (self.device_pace.ms_per_token or own_ms) - 1) if own_ms else 0.0
        return self._tokens - self._cloud_at < max(KNOWN, loses / PROBES)

    def hinted(self, lost_ms: float, own_ms: float) -> None:
        """Adds the time that tokens with hints took beyond the cloud's own; below 0: time that they saved."""
        self._hints_lost_ms = max(self._hints_lost_ms + lost_ms, -HINTS_MAY_SAVE * own_ms)

    def hints_lose(self, own_ms: float) -> bool:
        """Whether hints have lost more than they may."""
        return self._hints_lost_ms > HINTS_MAY_LOSE * own_ms

    def used(self) -> None:
        """Notes that the device drafts in a mode; once unused, it is measured often again."""
        self._pause = FIRST_PAUSE
        self._measure_at = self._tokens

    def takes_measurement(self) -> bool:
        """Whether an unused device drafts a little now, to measure. A yes begins the next, longer pause."""
        if self._tokens < self._measure_at:
            return False
        self._measure_at = self._tokens + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True

    def left_ms(self, bound_ms: float) -> float:
        """Milliseconds that trials may still lose where a token may take `bound_ms`."""
        return SHARE * bound_ms * max(self._tokens, HORIZON) - self._lost_ms

    def corrected(self, mode: Mode, predicted_ms: float) -> float:
        """A predicted time per token, corrected by what was measured in the mode."""
        return predicted_ms * self._corrections.get(mode, 1.0)

    def measured(self, mode: Mode, ms_per_token: float, predicted_ms: float) -> None:
        """Corrects later predictions for the mode."""
        self._corrections[mode] = ms_per_token / predicted_ms

    def has_measured(self, mode: Mode) -> bool:
        """Whether a prediction for the mode is corrected by what was measured."""
        return mode in self._corrections

    def failed(self, mode: Mode, after: int) -> None:
        """Has the mode rest, because it proved too slow `after` so many tokens."""
        last = self._rests.get(mode)
        doubles = last is not None and after < last.length  # else the mode paid for a while
        length = min(2 * last.length, LONGEST_REST) if last is not None and doubles else FIRST_REST
        self._rests[mode] = ModeRest(self._tokens + length, length)
        if mode is Mode.HINTING:
            self._hints_lost_ms = 0.0
        self._corrections.pop(mode, None)  # behind the rest the plain prediction counts again

    def is_resting(self, mode: Mode) -> bool:
        """Whether the mode rests."""
        rest = self._rests.get(mode)
        return rest is not None and self._tokens < rest.until
