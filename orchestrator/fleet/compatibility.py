"""Which workers are not used, and why: another contract, other weights under a model's name, a tokenizer that
nobody here has.

Pure: knows what workers said, nothing of connections. Verifiers of one model have to be the same model, as a
session may go from one to another; where they are not, those that most agree with are used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.wire.workers import CONTRACT


class Identity(NamedTuple):
    """Which model it is, whatever it computes in."""

    tokenizer_digest: str
    vocabulary_size: int
    weights_digest: str
    """Empty: not known, then it is as any."""

    def agrees(self, other: "Identity") -> bool:
        """Whether a session can go from one to the other."""
        weights = self.weights_digest, other.weights_digest
        return self[:2] == other[:2] and (weights[0] == weights[1] or not all(weights))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a worker is not used."""

    kind: str
    """contract, model, tokenizer or name: what is wrong with it."""
    why: str
    """For the person who can mend it."""


@dataclass(frozen=True, slots=True)
class Described:
    """A verifier as it described itself."""

    address: str
    model: str
    identity: Identity
    reachable: bool


def other_contract(spoken: int) -> Refusal | None:
    """Where a worker does not speak this process's contract; one that does not say speaks the first."""
    if (spoken or 1) == CONTRACT:
        return None
    return Refusal(
        "contract",
        f"it speaks version {spoken} of the contract, this orchestrator {CONTRACT}: upgrade the older",
    )


def elected(verifiers: Iterable[Described], before: Mapping[str, Identity]) -> dict[str, Identity]:
    """Which identity each model's name stands for.

    That which most verifiers within reach agree with; among equals the one that it stood for before, then the
    first. With none within reach nothing changes.
    """
    by_model: dict[str, list[Described]] = {}
    for it in verifiers:
        by_model.setdefault(it.model, []).append(it)
    chosen = {}
    for model, described in by_model.items():
        present = [it for it in described if it.reachable]
        if not present:
            chosen[model] = before.get(model, described[0].identity)
            continue
        # One without known weights agrees with several that do not with one another: it is no candidate.
        identities = dict.fromkeys(it.identity for it in present)
        candidates = [
            one
            for one in identities
            if one.weights_digest or not any(it[:2] == one[:2] and it.weights_digest for it in identities)
        ]
        was = before.get(model)
        chosen[model] = max(
            candidates,
            key=lambda one: (
                sum(it.identity.agrees(one) for it in present),
                was is not None and was.agrees(one),
            ),
        )
    return chosen


def disagreeing(verifiers: Sequence[Described], chosen: Mapping[str, Identity]) -> dict[str, Refusal]:
    """By address, those that are not what their model's name stands for."""
    found = {}
    for it in verifiers:
        meant = chosen[it.model]
        if it.identity.agrees(meant):
            continue
        mine = it.identity
        if mine[:2] != meant[:2]:
            kind, what = "tokenizer", f"has tokenizer {_short(mine)}, other verifiers of it {_short(meant)}"
        else:
            what = (
                f"has weights {mine.weights_digest[:12]}, other verifiers of it {meant.weights_digest[:12]}"
            )
            kind = "model"
        found[it.address] = Refusal(
            kind, f"its {it.model!r} {what}: serve it under another --model-name, or the same weights"
        )
    return found


def unfitting(digests: Mapping[str, str], targets: Iterable[Identity]) -> dict[str, Refusal]:
    """By address, sources whose tokenizer (`digests`, empty: any will do) is that of no target."""
    known = {target.tokenizer_digest for target in targets}
    if not known:
        return {}
    return {
        address: Refusal(
            "tokenizer",
            f"it has tokenizer {digest[:12]}, which no target here has: they have "
            f"{', '.join(sorted(one[:12] or 'none' for one in known))}",
        )
        for address, digest in digests.items()
        if digest and digest not in known
    }


def _short(identity: Identity) -> str:
    return f"{identity.tokenizer_digest[:12] or 'none'} of {identity.vocabulary_size} ids"
