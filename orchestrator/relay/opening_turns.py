"""Which requests may be opened now, so that one tenant's burst does not hold up the streams of another.

A request costs every service most as it begins: sources and verifier read its prompt. While several tenants
have requests for one model here, each has a few begin at a time, and its further requests wait in the order
of their arrival. The number falls as the time from a request's turn to its first token grows. A tenant that
is alone never waits. Pure: callers bring what to do once a turn has come, and the clock.
"""

from collections import Counter, deque
from collections.abc import Callable

LEAST_AT_ONCE = 4
"""Choices of one tenant that may begin at once for each verifier, however late first tokens come."""
MOST_AT_ONCE = 16
"""The same where first tokens come within QUICK_S."""
QUICK_S = 0.02
"""Seconds from a turn to the first token at which a burst is hardly felt by others."""
_WEIGHT = 0.2
"""Weight of one request in the running mean of these seconds."""


class Turn:
    """One request's turn; `begin` is called once the request may be opened."""

    def __init__(self, turns: "OpeningTurns", tenant: str, choices: int, begin: Callable[[], None]) -> None:
        self._turns = turns
        self.tenant = tenant
        self.choices = choices
        self.begin = begin
        self.began_s = 0.0
        """When the turn came, by the clock."""
        self.opening = False
        """Whether the turn has come and the request has no token yet."""

    def opened(self) -> None:
        """The request has its first token, and another one of the tenant may begin."""
        self._turns.opened(self)

    def leave(self) -> None:
        """The request is over; it may have had no turn yet."""
        self._turns.leave(self)


class OpeningTurns:
    """The turns of all requests for one model that this orchestrator answers.

    Args:
        verifiers: how many verifiers could open a request now.
        now_s: a clock, in seconds.
        least: choices of one tenant that may begin at once for each verifier, however late first tokens come.
    """

    def __init__(
        self, verifiers: Callable[[], int], now_s: Callable[[], float], least: int = LEAST_AT_ONCE
    ) -> None:
        self._verifiers = verifiers
        self._now_s = now_s
        self._least = least
        self._opening_s = MOST_AT_ONCE / least * QUICK_S
        """Seconds from a turn to the first token, lately."""
        self._here: Counter[str] = Counter()
        """Requests by tenant, those that wait included."""
        self._opening: Counter[str] = Counter()
        """Choices by tenant that have begun and have no token yet."""
        self._waiting: dict[str, deque[Turn]] = {}

    def enter(self, tenant: str, choices: int, begin: Callable[[], None]) -> Turn:
        """A turn for a request of this many choices; `begin` is called now, or later unless it leaves."""
        turn = Turn(self, tenant, choices, begin)
        self._here[tenant] += 1
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._advance(tenant)
        return turn

    def opened(self, turn: Turn) -> None:
        """See Turn.opened."""
        if turn.opening:
            took_s = self._now_s() - turn.began_s
            self._opening_s += _WEIGHT * (took_s - self._opening_s)
            self._end_opening(turn)

    def leave(self, turn: Turn) -> None:
        """See Turn.leave."""
        self._end_opening(turn)
        if turn in (waiting := self._waiting.get(turn.tenant, deque())):
            waiting.remove(turn)
        _take(self._here, turn.tenant, 1)
        for tenant in list(self._waiting):  # one of them may be alone now
            self._advance(tenant)

    def _advance(self, tenant: str) -> None:
        waiting = self._waiting.get(tenant, deque())
        while waiting and self._may(waiting[0]):
            turn = waiting.popleft()
            turn.opening, turn.began_s = True, self._now_s()
            self._opening[tenant] += turn.choices
            turn.begin()
        if not waiting:
            self._waiting.pop(tenant, None)

    def _end_opening(self, turn: Turn) -> None:
        if turn.opening:
            turn.opening = False
            _take(self._opening, turn.tenant, turn.choices)
            self._advance(turn.tenant)

    def _may(self, turn: Turn) -> bool:
        opening = self._opening[turn.tenant]
        if len(self._here) < 2 or not opening:
            return True
        quick = MOST_AT_ONCE * QUICK_S / max(self._opening_s, QUICK_S)
        return opening + turn.choices <= max(self._least, round(quick)) * max(1, self._verifiers())


def _take(counts: Counter[str], tenant: str, count: int) -> None:
    """Counts down; a tenant without any is forgotten."""
    counts[tenant] -= count
    if not counts[tenant]:
        del counts[tenant]
