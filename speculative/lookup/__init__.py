"""Drafts copied from a text, and how likely the target is to accept a copied token."""

from bisect import bisect_right

# Match lengths, and the probability that one more copied token is accepted when at least as many matched.
# Priors per token, set by hand: a longer repeat says more, but beyond eight tokens hardly any more.
_MATCHED = (1, 2, 3, 4, 5, 8)
_PER_TOKEN = (0.25, 0.45, 0.6, 0.7, 0.8, 0.9)


def survival(match_length: int) -> float:
    """Probability that a copied token is accepted if the copied tokens before it are; 0 without a match."""
    matched = bisect_right(_MATCHED, match_length)
    return _PER_TOKEN[matched - 1] if matched else 0.0
