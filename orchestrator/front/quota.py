"""How much of the service one API key may use. Pure: the caller passes the time, in seconds that only rise.

A request is charged when it begins, its prompt when it is read, its tokens as they are delivered. An answer
may overdraw its bucket, and what comes after it waits until the bucket is full enough again: no answer is cut
off halfway, and no key gets more than its rate for long.
"""

from dataclasses import dataclass

from speculative.errors import InvalidRequest, QuotaExceeded

MINUTE_S = 60.0
STREAMS_RETRY_S = 1.0
LEAST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of one API key; None: no bound."""

    streams: int | None = None
    """The most requests at once."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """The most tokens of prompts and answers together."""

    @property
    def bounded(self) -> bool:
        """Whether the quota has any bound."""
        return self != Quota()

    def share(self, of: int) -> "Quota":
        """The part for one of several orchestrators that cannot count together; each bound is at least 1."""
        bounds = (self.streams, self.requests_per_minute, self.tokens_per_minute)
        return Quota(*(None if most is None else max(1, most // of) for most in bounds))


class Bucket:
    """A token bucket: holds a minute's worth, begins full, and fills at an even pace."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._level = self._most
        self._filled_at = now

    def take(self, amount: float, now: float) -> None:
        """Take this many units out of the bucket; its level may fall below zero."""
        self._fill(now)
        self._level -= amount

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds this amount or is full; 0: it holds the amount now."""
        self._fill(now)
        missing = min(amount, self._most) - self._level
        return max(0.0, missing) * MINUTE_S / self._most

    def adopt(self, level: float, now: float) -> None:
        """Set the level to one that was counted elsewhere."""
        self._fill(now)
        self._level = min(level, self._most)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the bucket's size and rate; its level stays, as far as it fits."""
        self._fill(now)
        self._most = float(per_minute)
        self._level = min(self._level, self._most)

    def _fill(self, now: float) -> None:
        passed, self._filled_at = max(0.0, now - self._filled_at), max(now, self._filled_at)
        self._level = min(self._most, self._level + passed * self._most / MINUTE_S)


class Allowance:
    """How much of its quota one key has left."""

    def __init__(self, quota: Quota, now: float) -> None:
        self._quota = quota
        self._running = 0
        self._requests = _bucket(None, quota.requests_per_minute, now)
        self._tokens = _bucket(None, quota.tokens_per_minute, now)

    @property
    def running(self) -> int:
        """Requests of the key that run now."""
        return self._running

    def change(self, quota: Quota, now: float) -> None:
        """Replace the quota; what the key has used stays used."""
        if quota == self._quota:
            return
        self._quota = quota
        self._requests = _bucket(self._requests, quota.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, quota.tokens_per_minute, now)

    def begin(self, count: int, now: float, *, held: int = 0) -> None:
        """Begin this many requests, to be followed by `end`; `held` of the same call have begun before.

        Raises QuotaExceeded, and InvalidRequest where the quota could never allow `held + count` requests.
        """
        quota = self._quota
        for name, most in (("streams", quota.streams), ("requests_per_minute", quota.requests_per_minute)):
            if most is not None and held + count > most:
                raise InvalidRequest(f"prompt has {held + count} prompts; this key has {name} {most}")
        if quota.streams is not None and self._running + count > quota.streams:
            raise self.refusal("streams", self._running, now)
        for bucket, amount, what in ((self._requests, count, "requests"), (self._tokens, 1, "tokens")):
            if bucket is not None and bucket.wait_s(amount, now) > 0:
                raise self.refusal(what, self._running, now, amount)
        self._running += count
        if self._requests is not None:
            self._requests.take(count, now)

    def adopt(self, requests_left: float, tokens_left: float, now: float) -> None:
        """Set what the key has left of its minute to what all orchestrators together have counted."""
        for bucket, level in ((self._requests, requests_left), (self._tokens, tokens_left)):
            if bucket is not None:
                bucket.adopt(level, now)

    def refusal(self, bound: str, running: int, now: float, amount: int = 1) -> QuotaExceeded:
        """The error for a request that this bound refuses: streams, requests or tokens.

        Args:
            running: the key's requests that run now.
            amount: requests, or tokens, that the bucket has to hold first.
        """
        if bound == "streams":
            return QuotaExceeded(
                f"{running} requests of this key run, {self._quota.streams} may", STREAMS_RETRY_S
            )
        bucket = self._requests if bound == "requests" else self._tokens
        wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
        return QuotaExceeded(
            f"this key's {bound} of the minute are used up; try again in {wait_s:.1f} s",
            max(LEAST_RETRY_S, round(wait_s, 2)),
        )

    def end(self, count: int) -> None:
        """Count this many of the key's requests as ended."""
        self._running -= count

    def spend(self, tokens: int, now: float) -> None:
        """Charge the key for this many tokens, read or delivered."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)


def _bucket(held: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if held is None:
        return Bucket(per_minute, now)
    held.resize(per_minute, now)
    return held
