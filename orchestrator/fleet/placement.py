"""Which verifier a session goes to, and which sources draft for it.

Pure: drives no connection, reads no clock. Knows nothing of prompts, tokens or messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

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
    capacity: int = 0
    """Sessions that it takes; 0: not known, then as many as any other."""
    step_s: float = 0.0
    """How long its steps take, in seconds; 0: not known, then as long as those of the fastest."""
    draining: bool = False
    """Whether it is about to end."""
    numerics: str = ""
    """How it computes."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A remote source as placement sees it."""

    address: str
    name: str
    tokenizer_digest: str
    """Empty: any tokenizer will do, or it has none."""
    sessions: int
    reachable: bool
    capacity: int = 0
    """As a Worker's."""
    step_s: float = 0.0
    """Likewise."""
    draining: bool = False
    """Likewise."""

    @property
    def usable(self) -> bool:
        """Whether a session is better off with it than without."""
        return self.reachable and not self.draining


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """A source that Open will name. An empty address means: inside the verifier."""

    name: str
    address: str


class Burdens:
    """How much one more session weighs on each of several workers: less is better.

    The share of its sessions in what it takes, times how much slower its steps are than those of the fastest.
    Only every doubling of a step counts: what is measured under load sways.
    """

    def __init__(self, workers: Iterable[Worker | Drafting]) -> None:
        workers = tuple(workers)
        self._most = max((it.capacity for it in workers), default=0) or 1
        self._fastest_s = min((it.step_s for it in workers if it.step_s > 0), default=0.0)

    def of(self, worker: Worker | Drafting, fewer: int = 0) -> float:
        """As if it had so many sessions `fewer`."""
        slower = 2.0 ** round(log2(worker.step_s / self._fastest_s)) if worker.step_s > 0 else 1.0
        return (max(0, worker.sessions - fewer) + 1) / (worker.capacity or self._most) * slower


def ranked(
    workers: Iterable[Worker], model: str, preferred: str = "", near: str = "", numerics: str = ""
) -> list[Worker]:
    """Verifiers of this model that can be reached and stay: the preferred one, then those that compute as
    `numerics` says where it says something, then by burden, full ones last; ties keep their order.

    The one that is `near`, as it has a prefix, counts as if it had NEARNESS sessions fewer: a common prefix
    must not draw everybody to one place.
    """
    fitting = [it for it in workers if it.reachable and it.model == model and not it.draining]
    burdens = Burdens(fitting)

    def place(it: Worker) -> tuple[bool, bool, bool, float, bool]:
        full = 0 < it.capacity <= it.sessions
        burden = burdens.of(it, fewer=NEARNESS * (it.address == near))
        return (
            it.address != preferred,
            bool(numerics) and it.numerics != numerics,
            full,
            burden,
            it.address != near,
        )

    return sorted(fitting, key=place)


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

    Of several that share a name one that can be reached and stays is taken, the least burdened; `turn` (any
    counter) rotates among equals. A source that cannot be reached is named where there is no other: the
    verifier dials it until it is back.

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


def replaced(
    chosen: Sequence[ChosenSource], fitting: Sequence[Drafting], *, turn: int = 0
) -> tuple[ChosenSource, ...]:
    """The same names. What is gone, out of reach or about to end gives way to another of its name, if there
    is one that is none of this; what serves well stays."""
    usable = [it for it in fitting if it.usable]
    there = {(it.name, it.address) for it in usable}
    found = []
    for source in chosen:
        others = [it for it in usable if it.name == source.name]
        if source.address and (source.name, source.address) not in there and others:
            source = ChosenSource(source.name, _least_loaded(others, turn).address)
        found.append(source)
    return tuple(found)


def _least_loaded(same_name: Sequence[Drafting], turn: int) -> Drafting:
    start = turn % len(same_name)
    rotated = [*same_name[start:], *same_name[:start]]
    burdens = Burdens(rotated)
    return min(rotated, key=lambda it: (not it.usable, burdens.of(it)))
