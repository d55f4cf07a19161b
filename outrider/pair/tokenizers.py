"""Compares two tokenizers: they fit where each id stands for the same token in both. Pure."""

from dataclasses import dataclass

from outrider.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of comparing two tokenizers."""

    ok: bool
    difference: str = ""
    """The first difference in words; empty where the tokenizers fit."""


def fit(target: TokenTable | None, drafter: TokenTable | None) -> Fit:
    """Compares two tokenizers as the services do, by the digest of all ids with their tokens."""
    if target is None or drafter is None:
        whose = " and ".join(
            name for name, table in (("the target", target), ("the drafter", drafter)) if table is None
        )
        return Fit(False, f"{whose} came without a tokenizer that the `tokenizers` library can express")
    if target.digest == drafter.digest:
        return Fit(True)
    return Fit(False, _first_difference(target, drafter))


def _first_difference(target: TokenTable, drafter: TokenTable) -> str:
    different = [
        id_ for id_ in range(max(target.size, drafter.size)) if target.token(id_) != drafter.token(id_)
    ]
    first = different[0]
    return (
        f"id {first} is {_shown(target.token(first))} in the target's and {_shown(drafter.token(first))} in "
        f"the drafter's; {len(different):,} ids differ, of {target.size:,} and {drafter.size:,}"
    )


def _shown(token: str) -> str:
    return repr(token) if token else "nothing"
