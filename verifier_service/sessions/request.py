"""The request of an Open, checked field by field.

Each fault is an InvalidRequest that names field, value and range.
"""

from dataclasses import dataclass

from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    SessionKey,
    grammar_from_wire,
    key_from_wire,
    logprobs_from_wire,
    sampling_from_wire,
)
from outrider.wire.incoming.shape import SMALL_BYTES, Bounds
from outrider.wire.names import MAX_SOURCES, checked_corpora, checked_source_name
from speculative.errors import InvalidRequest, UnknownModel
from speculative.grammar import Grammar
from speculative.logprobs import Logprobs
from speculative.params import SamplingParams
from speculative.stop import stop_bytes
from verifier_service.proposers import PROPOSERS

MAX_NODES = 256
"""The highest node limit that a request may set."""
_MAX_ADDRESS = 262  # the longest host name, a colon and a port
_ID_BYTES = 5  # the most on the wire
_FIXED_BYTES = 256 * 1024  # more than a grammar, biases, stop strings, sources and names come to


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are checked against."""

    model: str
    """The model's name in requests."""
    vocabulary_size: int
    """Width of the model's logits."""
    max_length: int
    """The most tokens of a session, prompt and output."""
    node_limit: int
    """The node limit of a request that gives none."""
    eos_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids."""
    replay_identical: bool = False
    """Whether the model computes under the deterministic profile."""
    proposers: tuple[str, ...] = tuple(sorted(PROPOSERS))
    """Names of the sources inside this worker."""


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Name and address of one source of a request."""

    name: str
    address: str
    """The source's host:port; empty for a proposer inside this worker."""


@dataclass(frozen=True, slots=True)
class SourceSet:
    """The sources of one session."""

    names: tuple[str, ...]
    """Source names: source index k is names[k - 1]. Only ever grows, whichever sources are in use."""
    proposers: frozenset[int]
    """Indices of the proposers in use inside this worker."""
    remote: frozenset[int]
    """Indices of the sources in use outside this worker."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A checked request to decode a session."""

    key: SessionKey
    epoch: int
    ids: tuple[int, ...]
    """Token ids of the prompt and of the output so far."""
    prompt_length: int
    """Length of the prompt, in tokens."""
    limit: int
    """The most tokens of the session, prompt and output."""
    params: SamplingParams
    """Sampling parameters; `min_tokens` holds the model's end-of-sequence ids back."""
    seed: int
    stops: tuple[bytes, ...]
    """Stop strings, in UTF-8."""
    time_left_s: float | None
    """Time until the request's deadline, in seconds; None: no deadline."""
    node_limit: int
    """The most drafted nodes of one round; 0: the session does not speculate."""
    sources: tuple[SourceAddress, ...]
    end_ids: frozenset[int] = frozenset()
    """All token ids that end the session."""
    logprobs: Logprobs | None = None
    """The log-probabilities to return with each token; None: none."""
    recovered: bool = False
    """Whether the session was admitted before, to a worker that is gone."""
    grammar: Grammar | None = None
    """The grammar of the output; None: any text."""
    replay_identical: bool = False
    """Whether every verifier of the same numerics would give the same tokens."""
    learn: bool = False
    """Whether sources may keep the output to draft from."""
    corpora: tuple[str, ...] = ()
    """Names of the corpora that sources may draft from; empty: all corpora of the tenant."""
    prediction: tuple[int, ...] = ()
    """Token ids that the output may resemble."""
    score_from: int | None = None
    """Position of the first token of the prompt that is to be scored: committed with its log-probabilities.
    None: the prompt is not scored."""


def open_bounds(served: ServedModel) -> Bounds:
    """Bounds of an Open: two contexts of token ids, a prediction's among them, and fields of a fixed size."""
    return Bounds(
        most_bytes=2 * served.max_length * _ID_BYTES + _FIXED_BYTES,
        most_numbers=2 * served.max_length + SMALL_BYTES // _ID_BYTES,
        because=f"no Open of a context of {served.max_length} tokens is larger",
    )


def request_from_wire(message: verifier_pb2.OpenRequest, served: ServedModel) -> SessionRequest:
    """The session that an Open asks for. Raises InvalidRequest, or UnknownModel for another model."""
    key = key_from_wire(message.key)
    if message.model != served.model:
        raise UnknownModel(f"model {message.model!r} is not served here; {served.model!r} is")
    for name, count in (("ids", len(message.ids)), ("prediction", len(message.prediction))):
        if count > served.max_length:
            raise InvalidRequest(
                f"{name} has {count} ids; {served.model} takes {served.max_length} tokens at most here"
            )
    ids = tuple(message.ids)
    _check_ids(ids, message, served)
    params = sampling_from_wire(message.sampling, served.vocabulary_size)
    params.check_stops(message.limit - message.prompt_length)
    asked = message.node_limit if message.HasField("node_limit") else served.node_limit
    if asked > MAX_NODES:
        raise InvalidRequest(f"node_limit is {asked}; it may be 0 to {MAX_NODES}")
    speculates = message.speculate and asked > 0
    if message.score_prompt:
        _check_scoring(message)
    return SessionRequest(
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
        sources=_sources(message, served) if speculates else (),
        end_ids=params.end_ids(served.eos_ids),
        logprobs=logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
        recovered=message.recovered,
        grammar=_grammar(message, params),
        replay_identical=served.replay_identical,
        learn=message.learn,
        corpora=checked_corpora(message.corpora),
        prediction=_prediction(message, served),
        score_from=1 if message.score_prompt else None,
    )


def _check_ids(ids: tuple[int, ...], message: verifier_pb2.OpenRequest, served: ServedModel) -> None:
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


def _check_scoring(message: verifier_pb2.OpenRequest) -> None:
    """Raises InvalidRequest where a prompt cannot be scored as this Open asks."""
    if not message.HasField("logprobs"):
        raise InvalidRequest("score_prompt is true without logprobs; give both")
    if message.speculate:
        raise InvalidRequest("score_prompt is true beside speculate; give one of them")
    if len(message.ids) > message.prompt_length:
        raise InvalidRequest(
            f"score_prompt is true, but {len(message.ids) - message.prompt_length} ids are generated already"
        )


def _grammar(message: verifier_pb2.OpenRequest, params: SamplingParams) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    grammar = grammar_from_wire(message.grammar)
    grammar.check_with(params)
    return grammar


def _prediction(message: verifier_pb2.OpenRequest, served: ServedModel) -> tuple[int, ...]:
    ids = tuple(message.prediction)
    if len(ids) >= served.max_length or any(id_ >= served.vocabulary_size for id_ in ids):
        raise InvalidRequest(
            f"prediction has {len(ids)} ids; fewer than {served.max_length} are possible, each below "
            f"{served.vocabulary_size}"
        )
    return ids


def _check_source(source: SourceAddress, served: ServedModel) -> None:
    checked_source_name(source.name)
    if len(source.address) > _MAX_ADDRESS:
        raise InvalidRequest(
            f"the address of source {source.name!r} has {len(source.address)} characters; give host:port, at "
            f"most {_MAX_ADDRESS}"
        )
    inside = source.name in served.proposers
    if not source.address and not inside:
        known = ", ".join(served.proposers)
        raise InvalidRequest(f"source {source.name!r} has no address; inside this worker there are {known}")
    if source.address and inside:
        raise InvalidRequest(
            f"source {source.name!r} has an address, {source.address!r}, but a source inside this worker is "
            f"called so; give it another name"
        )


def _sources(message: verifier_pb2.OpenRequest, served: ServedModel) -> tuple[SourceAddress, ...]:
    if (count := len(message.sources)) > MAX_SOURCES:
        raise InvalidRequest(f"there are {count} sources; at most {MAX_SOURCES}")
    sources = tuple(SourceAddress(source.name, source.address) for source in message.sources)
    for source in sources:
        _check_source(source, served)
    if len({source.name for source in sources}) < len(sources):
        raise InvalidRequest(f"two sources have one name: {', '.join(source.name for source in sources)}")
    return sources
