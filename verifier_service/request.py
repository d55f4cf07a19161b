"""What an Open asks for, checked: a fault is an InvalidRequest that names field, value and range."""

from dataclasses import dataclass

from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    SessionKey,
    grammar_from_wire,
    key_from_wire,
    logprobs_from_wire,
    sampling_from_wire,
)
from outrider.wire.names import checked_corpora, checked_source_name
from speculative.commit import stop_bytes
from speculative.errors import InvalidRequest, UnknownModel
from speculative.grammar import Grammar
from speculative.logprobs import Logprobs
from speculative.params import SamplingParams
from verifier_service.proposers import PROPOSERS

MAX_NODES = 256
_MAX_SOURCES = 16
_MAX_ADDRESS = 262  # the longest host name, a colon and a port


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are checked against."""

    model: str
    vocabulary_size: int
    max_length: int
    node_limit: int
    """Of a request that does not say."""
    eos_ids: frozenset[int] = frozenset()
    """The target's end-of-sequence ids."""
    replay_identical: bool = False
    """Whether the target computes under the deterministic profile."""


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Where drafts come from: host:port, or empty for a source inside this worker."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class SourceSet:
    """The sources of one session."""

    names: tuple[str, ...]
    """Source names: source index k is names[k - 1]. Only ever grows, whichever sources are in use."""
    local: frozenset[int]
    """Indices of the proposers in use inside this worker."""
    remote: frozenset[int]
    """Indices of the sources in use outside this worker."""


@dataclass(frozen=True, slots=True)
class Request:
    """A session as it is to be decoded."""

    key: SessionKey
    epoch: int
    ids: tuple[int, ...]
    prompt_length: int
    limit: int
    params: SamplingParams
    """As the target applies them: min_tokens holds its end-of-sequence ids back."""
    seed: int
    stops: tuple[bytes, ...]
    time_left_s: float | None
    node_limit: int
    """0 where the session does not speculate."""
    sources: tuple[SourceAddress, ...]
    end_ids: frozenset[int] = frozenset()
    """All ids that end it."""
    logprobs: Logprobs | None = None
    """What is told of its ids; None: nothing."""
    recovered: bool = False
    """Whether it was admitted before, to a worker that is gone."""
    grammar: Grammar | None = None
    """What its text has to be; None: anything."""
    replay_identical: bool = False
    """Whether every verifier of the same numerics would give the same ids."""
    learn: bool = False
    """Whether sources may keep its output to draft from."""
    corpora: tuple[str, ...] = ()
    """Corpora that sources may draft from, by name; empty: all that its tenant may."""
    prediction: tuple[int, ...] = ()
    """Ids that its output may resemble."""


def request_from_wire(message: verifier_pb2.OpenRequest, served: Served) -> Request:
    """Raises InvalidRequest, or UnknownModel where another model is asked for."""
    key = key_from_wire(message.key)
    if message.model != served.model:
        raise UnknownModel(f"model {message.model!r} is not served here; {served.model!r} is")
    ids = tuple(message.ids)
    _check_ids(ids, message, served)
    params = sampling_from_wire(message.sampling, served.vocabulary_size)
    params.check_ending(message.limit - message.prompt_length)
    asked = message.node_limit if message.HasField("node_limit") else served.node_limit
    if asked > MAX_NODES:
        raise InvalidRequest(f"node_limit is {asked}; it may be 0 to {MAX_NODES}")
    speculates = message.speculate and asked > 0
    return Request(
        key=key,
        epoch=message.epoch,
        ids=ids,
        prompt_length=message.prompt_length,
        limit=message.limit,
        params=params.holding_back(served.eos_ids),
        seed=message.seed,
        stops=stop_bytes(message.stop),
        time_left_s=message.time_left_ms / 1000 if message.time_left_ms else None,
        node_limit=asked if speculates else 0,
        sources=_sources(message) if speculates else (),
        end_ids=params.end_ids(served.eos_ids),
        logprobs=logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
        recovered=message.recovered,
        grammar=_grammar(message, params),
        replay_identical=served.replay_identical,
        learn=message.learn,
        corpora=checked_corpora(message.corpora),
        prediction=_prediction(message, served),
    )


def _check_ids(ids: tuple[int, ...], message: verifier_pb2.OpenRequest, served: Served) -> None:
    if not ids:
        raise InvalidRequest("ids is empty; a session starts from at least one id")
    if max(ids) >= served.vocabulary_size:
        position = next(at for at, id_ in enumerate(ids) if id_ >= served.vocabulary_size)
        raise InvalidRequest(
            f"ids[{position}] is {ids[position]}; ids of {served.model} are below {served.vocabulary_size}"
        )
    if not 1 <= message.prompt_length <= len(ids):
        raise InvalidRequest(
            f"prompt_length is {message.prompt_length}; with {len(ids)} ids it must be 1 to {len(ids)}"
        )
    if not message.prompt_length < message.limit <= served.max_length:
        raise InvalidRequest(
            f"limit is {message.limit}; after a prompt of {message.prompt_length} ids it must be "
            f"{message.prompt_length + 1} to {served.max_length}, the most that {served.model} takes here"
        )


def _grammar(message: verifier_pb2.OpenRequest, params: SamplingParams) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    grammar = grammar_from_wire(message.grammar)
    grammar.check_with(params)
    return grammar


def _prediction(message: verifier_pb2.OpenRequest, served: Served) -> tuple[int, ...]:
    ids = tuple(message.prediction)
    if len(ids) >= served.max_length or any(id_ >= served.vocabulary_size for id_ in ids):
        raise InvalidRequest(
            f"prediction has {len(ids)} ids; fewer than {served.max_length} are possible, each below "
            f"{served.vocabulary_size}"
        )
    return ids


def _check_source(source: SourceAddress) -> None:
    checked_source_name(source.name)
    if len(source.address) > _MAX_ADDRESS:
        raise InvalidRequest(
            f"the address of source {source.name!r} has {len(source.address)} characters; give host:port, at "
            f"most {_MAX_ADDRESS}"
        )
    inside = source.name in PROPOSERS
    if not source.address and not inside:
        known = ", ".join(sorted(PROPOSERS))
        raise InvalidRequest(f"source {source.name!r} has no address; inside this worker there are {known}")
    if source.address and inside:
        raise InvalidRequest(
            f"source {source.name!r} has an address, {source.address!r}, but a source inside this worker is "
            f"called so; give it another name"
        )


def _sources(message: verifier_pb2.OpenRequest) -> tuple[SourceAddress, ...]:
    sources = tuple(SourceAddress(source.name, source.address) for source in message.sources)
    if len(sources) > _MAX_SOURCES:
        raise InvalidRequest(f"there are {len(sources)} sources; at most {_MAX_SOURCES}")
    for source in sources:
        _check_source(source)
    if len({source.name for source in sources}) < len(sources):
        raise InvalidRequest(f"two sources have one name: {', '.join(source.name for source in sources)}")
    return sources
