"""Which verifier a session goes to, and which sources draft for it.

Pure: drives no connection, reads no clock. Knows nothing of prompts, tokens or messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.wire.names import PREDICTION
from speculative.errors import InvalidRequest

NEARNESS = 4
"""How many sessions less a verifier may have before one that has a session's prefix is passed over."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A verifier as placement sees it."""

    address: str
    model: str
    sessions: int
    """Sessions that orchestrators have there now, as far as this one knows."""
    reachable: bool


@dataclass(frozen=True, slots=True)
class Drafting:
    """A remote source as placement sees it."""

    address: str
    name: str
    tokenizer_digest: str
    """Empty: any tokenizer will do, or it has none."""
    sessions: int
    reachable: bool


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """A source that Open will name. An empty address means: inside the verifier."""

    name: str
    address: str


def ranked(workers: Iterable[Worker], model: str, preferred: str = "", near: str = "") -> list[Worker]:
    """Reachable verifiers of this model: the preferred one, then by sessions; ties keep their order.

    The one that is `near`, as it has a prefix, counts as if it had NEARNESS sessions fewer: a common prefix
    must not draw everybody to one place.
    """
    fitting = [worker for worker in workers if worker.reachable and worker.model == model]
    return sorted(
        fitting, key=lambda it: (it.address != preferred, it.sessions - NEARNESS * (it.address == near))
    )


def fitting_sources(drafting: Iterable[Drafting], tokenizer_digest: str) -> list[Drafting]:
    """Remote sources that can follow a target with this tokenizer."""
    return [d for d in drafting if d.tokenizer_digest in ("", tokenizer_digest)]


def inside(local: Sequence[str], *, predicted: bool = False) -> tuple[str, ...]:
    """Of the sources inside a verifier those that draft for a request; one of them needs a prediction."""
    return tuple(name for name in local if predicted or name != PREDICTION)


def source_names(local: Sequence[str], fitting: Iterable[Drafting]) -> tuple[str, ...]:
    """Every name that a request may ask for: the verifier's own first, each once."""
    return tuple(dict.fromkeys([*local, *(d.name for d in fitting)]))


def choose_sources(
    local: Sequence[str], fitting: Sequence[Drafting], wanted: Sequence[str], *, turn: int = 0
) -> tuple[ChosenSource, ...]:
    """One source per name: those that `wanted` names, or all of them where it names none.

    Of several that share a name the reachable one with the fewest sessions is taken; `turn` (any counter)
    rotates among equals. A source that cannot be reached is named where there is no other: the verifier dials
    it until it is back.

    Raises InvalidRequest where `wanted` has a name that nobody has.
    """
    names = source_names(local, fitting)
    if unknown := [name for name in wanted if name not in names]:
        raise InvalidRequest(
            f"speculation.sources names {unknown[0]!r}, which does not draft for this model; "
            f"there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
        )
    chosen = []
    for name in names:
        if wanted and name not in wanted:
            continue
        address = "" if name in local else _least_loaded([d for d in fitting if d.name == name], turn).address
        chosen.append(ChosenSource(name, address))
    return tuple(chosen)


def _least_loaded(same_name: Sequence[Drafting], turn: int) -> Drafting:
    start = turn % len(same_name)
    rotated = [*same_name[start:], *same_name[:start]]
    return min(rotated, key=lambda d: (not d.reachable, d.sessions))
