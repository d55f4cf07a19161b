"""How far each memory can be trusted, learnt from the tokens that targets committed.

The memories that know a place are experts of a mixture: each says how likely every token is there, and has a
weight beside the weight of "none of them". A weight is kept as log odds against none, by memory, by the
length of the match and by how often the match occurred. A weight begins as the prior of copied tokens and
follows the gradient of the mixture's log-likelihood, so a memory gains most where it alone was right. Pure;
knows nothing of tries, sessions' ids or the wire.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Final, NamedTuple

from speculative.lookup import survival

_LENGTHS: Final = (1, 2, 3, 4, 5, 8, 12, 20, 32)
_OCCURRENCES: Final = (2, 4)
_RATE: Final = 0.2
"""Step of what a tenant's sessions learn together."""
_SESSION_RATE: Final = 0.1
"""Step of what one session learns: its text soon says more than other sessions' texts."""
_MOST: Final = 6.0
_MOST_OF_SESSION: Final = 3.0
_IN_SPITE: Final = 0.02
"""Likelihood of a token that some memory knows, if none of the memories is right."""
_LEAST: Final = 1e-4
_TENANTS: Final = 1000


class Kind(NamedTuple):
    """What a weight is learnt for."""

    memory: str
    length: int
    """Band of the match's length."""
    occurrences: int
    """Band of the occurrences that were read."""


class Expert(NamedTuple):
    """What one memory says of one place."""

    kind: Kind
    given: Mapping[int, float]
    """The probability of each token that the memory knows there, if the memory is right."""


def kind_of(memory: str, match_length: int, occurrences: int) -> Kind:
    """The kind of a place with `match_length` matching tokens before it and so many occurrences."""
    return Kind(memory, bisect_right(_LENGTHS, match_length), bisect_right(_OCCURRENCES, occurrences))


class Trust:
    """What the sessions of one tenant have learnt."""

    def __init__(self) -> None:
        self.odds: dict[Kind, float] = {}

    def of(self, kind: Kind) -> float:
        """Log odds against none of the memories."""
        known = self.odds.get(kind)
        if known is None:
            prior = survival(_LENGTHS[max(0, kind.length - 1)])
            known = self.odds[kind] = log(prior / (1 - prior))
        return known


class SessionTrust:
    """What one session has learnt, on top of its tenant's other sessions.

    Args:
        tenant: what the tenant's other sessions have taught.
        teaches: whether the session teaches them in turn.
    """

    def __init__(self, tenant: Trust, teaches: bool) -> None:
        self._tenant, self._teaches = tenant, teaches
        self._own: dict[str, float] = {}

    def weights(self, experts: Sequence[Expert]) -> list[float]:
        """The probability of each expert to be the one that is right; the rest is for none of them."""
        odds = [exp(self._tenant.of(kind) + self._own.get(kind.memory, 0.0)) for kind, _ in experts]
        total = 1.0 + sum(odds)
        return [each / total for each in odds]

    def learn(self, experts: Sequence[Expert], token: int) -> None:
        """Learns from a place where `token` was committed."""
        weights = self.weights(experts)
        known = any(token in given for _, given in experts)
        likelihoods = [
            max(_LEAST, given.get(token, 0.0) if known else 1.0 - sum(given.values())) for _, given in experts
        ]
        none = (1.0 - sum(weights)) * (_IN_SPITE if known else 1.0)
        total = none + sum(weight * each for weight, each in zip(weights, likelihoods, strict=True))
        odds, own = self._tenant.odds, self._own
        for (kind, _), weight, likelihood in zip(experts, weights, likelihoods, strict=True):
            gradient = weight * likelihood / total - weight
            if self._teaches:
                odds[kind] = _bounded(odds[kind] + _RATE * gradient, _MOST)
            own[kind.memory] = _bounded(
                own.get(kind.memory, 0.0) + _SESSION_RATE * gradient, _MOST_OF_SESSION
            )


class TrustBook:
    """The trust of each tenant; tenants whose last session began longest ago are forgotten."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Trust] = OrderedDict()

    def session(self, tenant: str, teaches: bool = True) -> SessionTrust:
        """The trust of a new session of this tenant; `teaches`: whether later sessions learn from it."""
        trust = self._of.setdefault(tenant, Trust())
        self._of.move_to_end(tenant)
        if len(self._of) > _TENANTS:
            self._of.popitem(last=False)
        return SessionTrust(trust, teaches)


def _bounded(value: float, most: float) -> float:
    return max(-most, min(most, value))
