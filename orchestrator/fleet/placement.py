"""Which verifier a session goes to, and which sources draft for it.

Pure: drives no connection, reads no clock. Knows nothing of prompts, tokens or messages.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from outrider.wire.names import GRAMMAR, MAX_SOURCES, PREDICTION, REFERENCES
from speculative.errors import InvalidRequest

NEAR_S = 0.002
"""Round trips up to this length, in seconds, count as none: within one place they vary as much."""
LAGGING = 4.0
"""A source lags if its step and its way together take this many times as long as another source's."""
LAG_S = 0.005
"""By how many seconds the step and the way of a lagging source are longer, at least."""
NEARNESS = 4
"""How many sessions fewer another verifier needs to be preferred to the one that has a session's prefix."""


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verifier as placement sees it."""

    address: str
    model: str
    sessions: int
    """Sessions that all orchestrators have there now, as far as this one knows."""
    reachable: bool
    capacity: int = 0
    """The most sessions that the verifier takes; 0: unknown, and counted as the largest known capacity."""
    step_s: float = 0.0
    """Duration of a step in seconds; 0: unknown, and counted as the shortest known duration."""
    draining: bool = False
    """Whether the verifier is about to end."""
    numerics: str = ""
    """Description of the verifier's arithmetic."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A remote source as placement sees it."""

    address: str
    name: str
    tokenizer_digest: str
    """Digest of the source's tokenizer; empty: it has none, or any tokenizer will do."""
    sessions: int
    """Sessions that all orchestrators send its way, as far as this one knows."""
    reachable: bool
    capacity: int = 0
    """The most sessions that the source follows; 0: unknown, and counted as the largest known capacity."""
    step_s: float = 0.0
    """Duration of a step in seconds; 0: unknown, and counted as the shortest known duration."""
    draining: bool = False
    """Whether the source is about to end."""
    proven: bool = False
    """Whether the target has accepted a token of the source's, as far as this orchestrator saw."""
    rank: int = 0
    """Place of `name` among the source's names, from 0."""
    tenant: str = ""
    """The only tenant that the source drafts for; empty: any tenant."""
    round_trip_s: float = 0.0
    """Duration of a call that computes nothing, in seconds: the distance from here; 0: unknown."""

    @property
    def usable(self) -> bool:
        """Whether a session is better off with this source than without it."""
        return self.reachable and not self.draining


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """A source that Open names. An empty address means a source inside the verifier."""

    name: str
    address: str


class LoadScore:
    """Scores how much one more session would load each of several workers: less is better.

    The score is the worker's sessions as a share of its capacity, times how much slower its steps are than
    those of the fastest worker. A source's distance counts as a part of its steps, as drafts take that much
    longer. Durations measured under load vary, so they count by doublings only.
    """

    def __init__(self, workers: Iterable[VerifierInfo | SourceInfo]) -> None:
        workers = tuple(workers)
        self._most = max((it.capacity for it in workers), default=0) or 1
        self._shortest_s = min((it.step_s for it in workers if it.step_s > 0), default=0.0)
        self._fastest_s = min(map(self.delay_s, workers), default=0.0)

    def delay_s(self, worker: VerifierInfo | SourceInfo) -> float:
        """Seconds that a step of the worker takes, and its way; an unknown step counts as the shortest."""
        way_s = worker.round_trip_s if isinstance(worker, SourceInfo) else 0.0
        return (worker.step_s or self._shortest_s) + (way_s if way_s > NEAR_S else 0.0)

    def of(self, worker: VerifierInfo | SourceInfo, fewer: int = 0) -> float:
        """The score of a worker, as if it had `fewer` sessions less."""
        slower = 2.0 ** round(log2(self.delay_s(worker) / self._fastest_s)) if self._fastest_s > 0 else 1.0
        return (max(0, worker.sessions - fewer) + 1) / (worker.capacity or self._most) * slower


def rank_verifiers(
    workers: Iterable[VerifierInfo], model: str, preferred: str = "", near: str = "", numerics: str = ""
) -> list[VerifierInfo]:
    """The verifiers of this model that can be reached and are not draining, the best place first.

    The order is: the preferred verifier; then verifiers with these numerics, where some are given; then by
    load score, full verifiers last. Ties keep their order.

    Args:
        preferred: address of the verifier that has the session itself, or empty.
        near: address of the verifier that has a long prefix of the session, or empty. It counts as if it had
            NEARNESS sessions fewer: a common prefix must not draw all sessions to one place.
        numerics: arithmetic of the verifiers that decoded the session so far, or empty.
    """
    fitting = [it for it in workers if it.reachable and it.model == model and not it.draining]
    score = LoadScore(fitting)

    def rank(it: VerifierInfo) -> tuple[bool, bool, bool, float, bool]:
        full = 0 < it.capacity <= it.sessions
        return (
            it.address != preferred,
            bool(numerics) and it.numerics != numerics,
            full,
            score.of(it, fewer=NEARNESS * (it.address == near)),
            it.address != near,
        )

    return sorted(fitting, key=rank)


def compatible_sources(
    sources: Iterable[SourceInfo], tokenizer_digest: str, tenant: str = ""
) -> list[SourceInfo]:
    """The remote sources that can follow a target with this tokenizer, for a session of this tenant.

    A source of one tenant, which may have learnt that tenant's text, is never among another tenant's.
    """
    return [
        source
        for source in sources
        if source.tokenizer_digest in ("", tokenizer_digest) and source.tenant in ("", tenant)
    ]


_DRAFTS_FROM = {
    GRAMMAR: "a grammar (a schema, a regular expression, or another format of the answer)",
    PREDICTION: "a predicted answer",
    REFERENCES: "reference texts",
}
"""What a request must have for a source of this name."""


def usable_local_sources(local: Sequence[str], given: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the sources inside a verifier that can draft for a request.

    Sources that draft from a part of the request are among them only if `given` names them.
    """
    return tuple(name for name in local if name in given or name not in _DRAFTS_FROM)


def source_names(local: Sequence[str], remote: Iterable[SourceInfo]) -> tuple[str, ...]:
    """Every name that a request may ask for, each once: first the names inside the verifier."""
    return tuple(dict.fromkeys([*local, *(source.name for source in remote)]))


def useful_names(local: Sequence[str], remote: Sequence[SourceInfo]) -> tuple[str, ...]:
    """The names that a request asks for if it names none: at most MAX_SOURCES, in the order of source_names.

    Names inside the verifier come first. Then come names of sources that the target has accepted tokens of,
    then of usable sources, then of others, and within each group every source's first name before any
    source's second one. So neither a worker with many names nor many workers that never draft anything take
    the place of a source that drafts well. Ties keep the order of `remote`.
    """
    names = source_names(local, remote)

    def burden(source: SourceInfo) -> tuple[bool, bool, int]:
        return not (source.usable and source.proven), not source.usable, source.rank

    best = {name: (False, False, -1) for name in local}
    for source in remote:
        best[source.name] = min(burden(source), best.get(source.name, (True, True, source.rank)))
    named = set(sorted(names, key=best.__getitem__)[:MAX_SOURCES])
    return tuple(name for name in names if name in named)


def choose_sources(
    local: Sequence[str],
    remote: Sequence[SourceInfo],
    wanted: Sequence[str],
    *,
    turn: int = 0,
    idle: Collection[str] = (),
) -> tuple[ChosenSource, ...]:
    """One source for each name in `wanted`, or for the most useful names where `wanted` is empty.

    Of several sources with one name, the least loaded one that can be reached and is not draining is chosen,
    the tenant's own source before others.
    A source that cannot be reached is chosen where there is no other: the verifier dials it until it is back.
    Raises InvalidRequest where `wanted` has a name that no source has, or more than MAX_SOURCES names.

    Args:
        local: names of the sources inside the verifier.
        remote: the remote sources that can follow the target.
        turn: any counter; it rotates among equally loaded sources.
        idle: names of sources inside the verifier that this request gives nothing to draft from.
    """
    names, known = useful_names(local, remote), set(source_names(local, remote))
    if unknown := [name for name in wanted if name not in known]:
        if (name := unknown[0]) in idle:
            raise InvalidRequest(
                f"speculation.sources names {name!r}, which drafts from {_DRAFTS_FROM[name]}, and the "
                f"request has none: add it, or leave {name!r} out"
            )
        raise InvalidRequest(
            f"speculation.sources names {unknown[0]!r}, which does not draft for this model; there "
            f"{'is' if len(known) == 1 else 'are'} {', '.join(names) or 'none'}"
            f"{f' and {more} more' if (more := len(known) - len(names)) else ''}"
        )
    if wanted:
        names = tuple(name for name in source_names(local, remote) if name in wanted)
    if len(names) > MAX_SOURCES:
        raise InvalidRequest(
            f"speculation.sources names {len(names)} sources; name at most {MAX_SOURCES}, or none for the "
            "most useful ones"
        )
    chosen = []
    for name in names:
        same_name = [source for source in remote if source.name == name]
        address = "" if name in local else _least_loaded(same_name, turn).address
        chosen.append(ChosenSource(name, address))
    return tuple(chosen)


def sources_at(chosen: Iterable[ChosenSource], local: Collection[str]) -> tuple[ChosenSource, ...]:
    """The session's sources as one verifier has them, of which `local` are inside it.

    Verifiers of one model may have other sources inside, by their settings or by their release. A session
    that moves leaves out what its new verifier lacks, which costs speed alone.
    """
    return tuple(
        ChosenSource(source.name, "") if source.name in local else source
        for source in chosen
        if source.address or source.name in local
    )


def replace_sources(
    chosen: Sequence[ChosenSource],
    remote: Sequence[SourceInfo],
    *,
    turn: int = 0,
    staying: Collection[str] = (),
) -> tuple[ChosenSource, ...]:
    """The session's sources by the same names, each unusable or lagging one replaced by another of its name.

    A source is unusable once it is gone, out of reach or draining. One lags if its step and its way take
    LAGGING times as long as another's. Sources that serve well stay.

    Args:
        staying: addresses of sources that no session leaves because they lag. A lagging source gets faster as
            sessions leave it, so they should leave it one by one.
    """
    usable = [it for it in remote if it.usable]
    there = {(it.name, it.address): it for it in usable}
    found = []
    for source in chosen:
        same_name = [it for it in usable if it.name == source.name]
        known = there.get((source.name, source.address))
        if source.address and known is None and same_name:
            source = ChosenSource(source.name, _least_loaded(same_name, turn).address)
        elif known is not None and source.address not in staying and len(same_name) > 1:
            best = _least_loaded(same_name, turn)
            source = ChosenSource(source.name, best.address) if _lags(known, best, same_name) else source
        found.append(source)
    return tuple(found)


def _lags(source: SourceInfo, best: SourceInfo, same_name: Sequence[SourceInfo]) -> bool:
    """Whether a source with known step times lags behind the best of its name, which has room."""
    if not source.step_s or not best.step_s or 0 < best.capacity <= best.sessions:
        return False
    score = LoadScore(same_name)
    mine, other = score.delay_s(source), score.delay_s(best)
    return mine > LAGGING * other and mine > other + LAG_S


def _least_loaded(same_name: Sequence[SourceInfo], turn: int) -> SourceInfo:
    start = turn % len(same_name)
    rotated = [*same_name[start:], *same_name[:start]]
    score = LoadScore(rotated)
    return min(rotated, key=lambda it: (not it.usable, not it.tenant, score.of(it)))
