"""Which workers are not used, and why.

A worker is refused for another contract, other weights under a model's name, or an unknown tokenizer.

Pure: knows workers' descriptions, nothing of connections. Verifiers of one model name have to serve the same
model, because a session may move from one to another; where they do not, the majority is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.fleet.target_model import ModelIdentity
from outrider.wire.channel import least_message_mb
from outrider.wire.workers import CONTRACT


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a worker is not used."""

    kind: str
    """What is wrong with the worker: contract, message, model, tokenizer or name."""
    why: str
    """The reason, for the person who can repair it."""


@dataclass(frozen=True, slots=True)
class DescribedVerifier:
    """A verifier with its own description."""

    address: str
    model: str
    identity: ModelIdentity
    reachable: bool


def contract_refusal(spoken: int) -> Refusal | None:
    """Why a worker of another contract version is refused; None: it has this process's version.

    A worker that names no version speaks the first.
    """
    if (spoken or 1) == CONTRACT:
        return None
    return Refusal(
        "contract",
        f"it speaks version {spoken} of the contract, this orchestrator {CONTRACT}: upgrade the older",
    )


def message_refusal(context: int, vocabulary_size: int, max_message_mb: int) -> Refusal | None:
    """Why an orchestrator with this bound refuses a verifier of this context; None: requests to it pass.

    The verifier checks its own bound as it starts.
    """
    least_mb = least_message_mb(context, vocabulary_size)
    if max_message_mb >= least_mb:
        return None
    return Refusal(
        "message",
        f"requests to its context of {context} tokens take up to {least_mb} MiB, and this orchestrator has "
        f"max_message_mb = {max_message_mb}: give {least_mb} or more, to every process of the deployment",
    )


def elect_identities(
    verifiers: Iterable[DescribedVerifier], before: Mapping[str, ModelIdentity]
) -> dict[str, ModelIdentity]:
    """The identity that each model's name stands for.

    The identity that most reachable verifiers agree with wins; of several, the one of before, then the first.
    Where no verifier can be reached, nothing changes.
    """
    by_model: dict[str, list[DescribedVerifier]] = {}
    for it in verifiers:
        by_model.setdefault(it.model, []).append(it)
    chosen = {}
    for model, described in by_model.items():
        present = [it for it in described if it.reachable]
        if not present:
            chosen[model] = before.get(model, described[0].identity)
            continue
        # An identity without known weights agrees with several that differ: it is no candidate.
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


def incompatible_verifiers(
    verifiers: Sequence[DescribedVerifier], chosen: Mapping[str, ModelIdentity]
) -> dict[str, Refusal]:
    """Refusals, by address, of verifiers that do not serve the model that their model's name stands for."""
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


def incompatible_sources(digests: Mapping[str, str], targets: Iterable[ModelIdentity]) -> dict[str, Refusal]:
    """Refusals, by address, of sources whose tokenizer no target has.

    Args:
        digests: tokenizer digests of the sources, by address; empty: any tokenizer will do.
    """
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


def _short(identity: ModelIdentity) -> str:
    return f"{identity.tokenizer_digest[:12] or 'none'} of {identity.vocabulary_size} ids"
