"""When a source is left alone: a remote source that gains too little for a while rests.

No session sends it progress for a number of steps, then one session does for a few rounds, and the rest grows
fourfold each time that it gains too little again. Accepted tokens that no better source had drafted are its
gain (`speculative.marginal`). Rounds are counted over all sessions, so short sessions find out together what
none of them could alone. A source that is slow, wrong or superfluous then costs next to nothing, and one that
gets better is noticed. Sources inside the verifier that draft from a session's own text rest by the same
rule, each session for itself (`proposers/own_text/active.py`).

How much a source slows steps down is measured (`source_presence.py`). The source has to save at least as
large a part of a session's rounds, and the dearer it is, the fewer rounds it has for that. Pure; knows
rounds, nothing of queues, sessions or trees.
"""

from dataclasses import dataclass

_FIRST_ROUNDS = 32.0
"""Rounds without a gain after which a source rests."""
LEAST_PRICE = 0.03
"""Rounds that a source has to save for each round that it is sent, whatever it was measured to cost: its
drafts are merged, and a remote source is sent progress."""
_PROBE_ROUNDS = 8.0
"""Rounds for which a resting source is tried again."""
_STAKE = 1.0
"""Time, in rounds, that a source may take from the target before it has to rest. A round that takes a third
of the target's speed, for instance, costs so much that few of them are tried."""
_CREDIT_ROUNDS = 16.0
"""Rounds, however dear, for which a source that has gained enough may then gain nothing: gains come in turns
with rounds that have none."""
_DEAREST = 8.0
"""The most that the weight of a round lengthens the first rest by."""
_PROBE_WEIGHT = 2.0
"""The most that a round of a trial counts for: a source that comes back has to catch up first."""
_FIRST_REST = 16
REST_GROWTH = 4
"""Factor by which each rest is longer than the one before: after each, rounds are lost on a trial."""
_MOST_REST = 256
"""The longest rest, in steps, where steps are slow or nobody knows how long they take."""
_MOST_REST_MS = 5000.0
"""How long a rest of more steps than that may last, in milliseconds."""
_SPARED_REST = 64
"""The longest rest, in steps, of a source whose drafts a batch never admitted, or that was right where others
were, too. The rest of the former also ends when the batch has shrunk to half: drafts may pay again."""
_SILENT = 0.25
"""What a round counts for if the source sends nothing: the source may be reading a long prompt, or have much
to draft later on. The target pays nearly as much for such a round as for any other."""
_SPARED = 8.0
"""A round in which there were drafts and none was admitted counts as this many: such a batch has no use for
them."""


def longest_rest(steps: int, step_ms: float) -> int:
    """The longest rest: `steps`, or as many as take 5 s where these are more; `step_ms` 0: not known."""
    return max(steps, int(_MOST_REST_MS / step_ms)) if step_ms else steps


@dataclass(slots=True, weakref_slot=True)
class SourceActivity:
    """Counts of one source over all sessions, and how long it rests."""

    rest: int = 0
    """Steps that the current rest lasts; 0: the source does not rest."""
    left: int = 0
    """Steps of the rest that remain until a session tries the source again."""
    step: int = 0
    """Number of the last step that was counted."""
    barren: float = 0.0
    """Rounds that were spent on the source and that its gain has not paid for, each by its weight. Below 0
    where the gain has paid for rounds to come."""
    tried: float = 0.0
    """Rounds in which sessions have tried the source since its last rest began."""
    crowd: int = 0
    """Sessions in the step that admitted none of its drafts; 0: it rests because its drafts were wrong."""
    late: bool = False
    """Whether the source sent drafts for a session that had ended. Set by the reader of its stream."""
    comebacks: int = 0
    """How often the source came back after its stream broke: it may be another process by now, with faster
    hardware or better weights. Counted by the reader of its stream."""
    noticed: int = 0
    """Number of comebacks for which sessions have tried the source."""

    @classmethod
    def doubtful(cls) -> "SourceActivity":
        """Counts of a source that gained too little in earlier sessions: it has a few rounds to gain more."""
        return cls(barren=_FIRST_ROUNDS - _PROBE_ROUNDS)

    def notice(self) -> None:
        """Notes that a session has seen the source come back: a rest ends, and the next is not longer."""
        if self.noticed != self.comebacks:
            self.noticed = self.comebacks
            self.barren, self.tried, self.crowd, self.left = 0.0, 0.0, 0, 0
            self.rest //= REST_GROWTH


class SourceThrottle:
    """Decides whether one source is sent the progress of one session.

    Args:
        activity: the source's, over all sessions; updated here.
        most_rest: the longest rest, in steps; None: that depends on how long steps take.
        credit: rounds for which a source that has gained much may then gain nothing.
    """

    __slots__ = (
        "_activity",
        "_begins",
        "_comebacks",
        "_credit",
        "_follows",
        "_left",
        "_most_rest",
        "_probed",
        "_silent",
        "resting",
    )

    def __init__(
        self, activity: SourceActivity, most_rest: int | None = None, credit: float = _FIRST_ROUNDS
    ) -> None:
        self._activity = activity
        self._comebacks = activity.noticed
        """The last comeback of the source that this session has noticed."""
        self._most_rest = most_rest
        self._credit = credit
        self.resting = activity.rest > 0
        """Whether the source is left alone: it is not sent the round that was committed last."""
        # Each session has some rounds of its own to try the source, unless all are too short for that.
        fewest = min(_PROBE_ROUNDS, 2 * _FIRST_ROUNDS - activity.barren)
        self._left = max(1.0, fewest, _FIRST_ROUNDS - activity.barren)
        self._probed = 0
        """Length, in steps, of the rest that this session has ended to try the source."""
        self._follows = self.resting
        """Whether the source rests because of what other sessions found."""
        self._begins = True
        """Whether this is the session's first round."""
        self._silent = not self.resting
        """Whether the source was sent rounds of this session since its last rest, and has sent nothing."""

    @property
    def is_spared(self) -> bool:
        """Whether the source rests because steps admitted none of its nodes."""
        return self.resting and self._activity.crowd > 0

    @property
    def on_trial(self) -> bool:
        """Whether the source rests, or is tried after a rest and has not paid for it yet."""
        return self.resting or self._probed > 0

    def committed(
        self,
        saved: float,
        heard: bool = True,
        spared: bool = False,
        batch: int = 1,
        step: int = 0,
        *,
        price: float = LEAST_PRICE,
        right: bool = False,
        pass_ms: float = 0.0,
    ) -> None:
        """A round of the session was committed.

        Args:
            saved: rounds that the source has saved; one for each committed token that no other had drafted.
            heard: whether the source had sent drafts. A silent source may still be reading a long prompt, so
                its rounds count for less, and its rest is over as soon as it sends drafts.
            spared: whether drafts were there, of any source, and the step admitted none of them; counts only
                in steps of several sessions.
            batch: sessions in the step.
            step: the step's number; 0: each call is a step of its own.
            price: rounds that the source has to save for each round that it is sent. The higher the price,
                the fewer rounds the source has for that.
            right: whether the source is often right, so that it gains nothing only where others are too.
            pass_ms: milliseconds that the step's forward took; 0: that was not measured.
        """
        if self._comebacks != self._activity.comebacks:
            self._start_over()
        # Drafts from before the rest end it only where they pay for as much as a trial would take.
        if self.resting and saved < _PROBE_ROUNDS * price:
            self._go_on_resting(heard and self._silent, batch, step)
        else:
            self._silent &= not heard
            weight = max(1.0, price / (1.0 + price) * _FIRST_ROUNDS / _STAKE)
            if saved > 0.0:
                self._pay(saved / price, weight)
            # Alone in its step, a session admits what is worth its row: no smaller batch would admit more.
            spared = spared and batch > 1
            self._spend(heard, spared, weight)
            if self._left <= 0:
                is_short = spared or (right and price <= LEAST_PRICE)
                most = _SPARED_REST if is_short else self._longest_rest(pass_ms)
                # What a batch had no room for, the next batch may have room for.
                self._rest(1.0 if spared else weight, most)
                self._follows = spared
                self._activity.crowd = batch if spared else 0
        self._begins = False

    def rested(self, batch: int, step: int) -> None:
        """As `committed`, for a round of a rest in which the source saved nothing and was not heard."""
        if self._comebacks != self._activity.comebacks:
            self._start_over()
        self._go_on_resting(False, batch, step)
        self._begins = False

    def _start_over(self) -> None:
        self._activity.notice()
        self._comebacks = self._activity.comebacks
        if self.resting:
            self._left = 0.0
        else:
            self._left, self._probed = max(self._left, _FIRST_ROUNDS), 0

    def _pay(self, rounds: float, weight: float) -> None:
        """Adds the rounds that a gain pays for; a source that has paid for the most is tried no longer.

        `weight` is how much a round counts for.
        """
        activity, most = self._activity, self._most_left(weight)
        self.resting = False
        self._left = min(self._left + rounds * weight, most + weight)
        barren = min(activity.barren, _FIRST_ROUNDS) - rounds * weight
        activity.barren, activity.late = max(_FIRST_ROUNDS - most, barren), False
        if self._left >= _FIRST_ROUNDS:
            self._probed = 0
            activity.rest, activity.tried = 0, 0.0

    def _longest_rest(self, pass_ms: float) -> int:
        """The longest rest, in steps of `pass_ms` milliseconds."""
        return longest_rest(_MOST_REST, pass_ms) if self._most_rest is None else self._most_rest

    def _spend(self, heard: bool, spared: bool, weight: float) -> None:
        """Takes the round that was just committed from those left."""
        activity = self._activity
        counts = min(weight, _PROBE_WEIGHT) if self._probed else weight
        # Where sessions end before a slow source drafts, late drafts are all that ever comes of it.
        if not (heard or activity.late or self._probed):
            counts *= _SILENT
        spent = max(_SPARED, counts) if spared and heard else counts
        activity.late = False
        self._left = min(self._most_left(weight), self._left - spent)
        activity.barren += spent
        if self._probed:
            activity.tried += spent

    def _rest(self, weight: float, most: int) -> None:
        """Begins a rest of at most `most` steps."""
        rest = min(REST_GROWTH * self._probed or int(_FIRST_REST * min(weight, _DEAREST)), most)
        self._activity.rest = max(self._activity.rest, rest) if not self._probed else rest
        self._activity.left = self._activity.rest
        self._activity.tried = 0.0
        self._left = rest
        self.resting = True

    def _go_on_resting(self, speaks: bool, batch: int, step: int) -> None:
        """Notes a round of a rest. `speaks`: the source was silent until now."""
        activity = self._activity
        self._left -= 1
        if not step or step != activity.step:
            activity.step = step
            activity.left -= 1
        # While the source does not rest for all sessions, this session's own count decides.
        # A session in its first round tries the source a little before the rest is over: most older sessions
        # are about to end, and would find out nothing.
        soon = _PROBE_ROUNDS if self._begins else 0.0
        due = activity.left <= soon if activity.rest else self._follows or self._left <= 0
        if due or speaks or 2 * batch <= activity.crowd:
            self.resting, self._follows, self._silent = False, False, True
            activity.crowd = 0
            self._left, self._probed = max(1.0, _PROBE_ROUNDS - activity.tried), activity.rest
            activity.left = activity.rest

    def _most_left(self, weight: float) -> float:
        """The most rounds that the session may have left for the source, where each counts for `weight`."""
        return max(self._credit, _CREDIT_ROUNDS * weight)
