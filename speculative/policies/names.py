"""The policies by name, each with its number: what requests and settings may say."""

import math
import re
from typing import Final, NamedTuple

from speculative.errors import InvalidRequest

DEFAULT_POLICY: Final = "survival"
"""The policy of a service that is told no other."""

MOST_CHARACTERS: Final = 64
"""Longest text that names a policy."""
_NUMBER: Final = re.compile(r"[0-9.eE+-]+", re.ASCII)


class PolicyKind(NamedTuple):
    """A policy that can be named."""

    where: str
    """The policy's class, as "module:class"."""
    value: float
    """The policy's number where a text names none."""
    least: float
    most: float
    means: str
    """What the number is, for people."""


POLICIES: Final = {
    "survival": PolicyKind(
        "speculative.policies.survival:SurvivalDepth", 0.01, 0, 1, "least chance that a place is reached"
    ),
    "fixed": PolicyKind("speculative.policies.fixed:FixedDepth", 5, 1, 255, "depth"),
    "heuristic": PolicyKind("speculative.policies.heuristic:LengthHeuristic", 5, 1, 255, "first depth"),
    "confidence": PolicyKind(
        "speculative.policies.confidence:ConfidenceThreshold", 0.4, 0, 1, "least probability of a token"
    ),
    "moving": PolicyKind("speculative.policies.moving:MovingThreshold", 0.6, 0, 1, "first threshold"),
    "entropy": PolicyKind("speculative.policies.entropy:EntropyBound", 0.3, 0, 1, "first threshold"),
    "learnt": PolicyKind("speculative.policies.learnt:LearntStop", 0.95, 0, 1, "risk at which a path ends"),
    "bandit": PolicyKind(
        "speculative.policies.bandit:DepthBandit", 0.1, 0, 10, "weight of an arm's uncertainty"
    ),
}
"""Name to kind. `NAME:NUMBER` sets the number."""


class PolicyChoice(NamedTuple):
    """A policy's name and number."""

    name: str
    value: float


def policy_choice(text: str) -> PolicyChoice:
    """The policy that `text` names, NAME or NAME:NUMBER. Raises InvalidRequest with the names there are."""
    if len(text) > MOST_CHARACTERS:
        raise InvalidRequest(f"policy has {len(text)} characters; at most {MOST_CHARACTERS} are possible")
    name, colon, number = text.partition(":")
    kind = POLICIES.get(name)
    if kind is None:
        raise InvalidRequest(f"policy is {text[:64]!r}; give one of {', '.join(POLICIES)}")
    if not colon:
        return PolicyChoice(name, kind.value)
    try:
        value = float(number) if _NUMBER.fullmatch(number) else math.nan
    except ValueError:
        value = math.nan
    if not kind.least <= value <= kind.most:
        raise InvalidRequest(
            f"policy is {text[:64]!r}; {name}:NUMBER takes its {kind.means}, {kind.least:g} to {kind.most:g}"
        )
    return PolicyChoice(name, value)


def checked_policy(text: str) -> str:
    """`text` itself, which is empty or names a policy. Raises InvalidRequest with the names there are."""
    if text:
        policy_choice(text)
    return text
