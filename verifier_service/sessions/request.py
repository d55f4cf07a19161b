"""The request of an Open, checked field by field.

Each fault is an InvalidRequest that names field, value and range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    SessionKey,
    grammar_from_wire,
    key_from_wire,
    logprobs_from_wire,
    sampling_from_wire,
)
from outrider.wire.criteria import criterion_from_wire, criterion_name
from outrider.wire.incoming.shape import SMALL_BYTES, Bounds
from outrider.wire.names import MAX_REFERENCES, MAX_SOURCES, checked_corpora, checked_source_name
from speculative.acceptance.criterion import Criterion, Promise
from speculative.acceptance.refusal import check_criterion
from speculative.errors import InvalidRequest, UnknownModel
from speculative.grammar import Grammar
from speculative.logprobs import Logprobs
from speculative.params import SamplingParams
from speculative.policies.names import checked_policy
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
    policy: str = ""
    """Draft policy of the sources inside this worker, for requests that name none; empty: none cuts them."""
    amateur_size: int = 0
    """Number of ids that the amateur knows, against which requests may contrast; 0: there is no amateur."""
    chains_only: bool = False
    """Whether the model verifies chains of drafts, not trees."""


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
    together: tuple[frozenset[int], ...] = ()
    """Indices of remote sources that share an address: they hear of the session together or not at all. A
    source that no group has is alone at its address."""

    def at_one_address(self, source_index: int) -> frozenset[int]:
        """Indices of the remote sources that share this one's address, itself included."""
        return next((group for group in self.together if source_index in group), frozenset((source_index,)))


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
    criterion: Criterion | None = None
    """How drafted tokens are accepted; None: by the path match."""
    references: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that the output may copy from, text by text."""
    policy: str = ""
    """Draft policy of the request, NAME or NAME:NUMBER; empty: each source's own."""
    score_from: int | None = None
    """Position of the first token of the prompt that is to be scored: committed with its log-probabilities.
    None: the prompt is not scored."""

    @property
    def promise(self) -> Promise:
        """What the request's criterion promises."""
        return Promise.SAME_IDS if self.criterion is None else self.criterion.promise


def open_bounds(served: ServedModel) -> Bounds:
    """Bounds of an Open: two contexts of token ids, and fields of a fixed size.

    One of the contexts is for the prediction and the references together.
    """
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
    if (count := len(message.ids)) > served.max_length:
        raise InvalidRequest(
            f"ids has {count} ids; {served.model} takes {served.max_length} tokens at most here"
        )
    _check_copied_lengths(message, served)
    ids = tuple(message.ids)
    _check_ids(ids, message, served)
    params = sampling_from_wire(message.sampling, served.vocabulary_size)
    params.check_stops(message.limit - message.prompt_length)
    _check_contrast(message, params, served)
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
        prediction=_copied_from("prediction", message.prediction, served),
        references=tuple(
            _copied_from(f"references[{at}]", text.ids, served) for at, text in enumerate(message.references)
        ),
        criterion=_criterion(message, params, served, speculates=speculates),
        policy=checked_policy(message.policy),
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


def _check_contrast(message: verifier_pb2.OpenRequest, params: SamplingParams, served: ServedModel) -> None:
    """Raises InvalidRequest where this verifier cannot contrast as the request asks."""
    if params.contrast is None:
        return
    if not served.amateur_size:
        raise InvalidRequest(
            f"contrast_strength is {params.contrast_strength:g}, but the verifier of {served.model} has no "
            "amateur; leave contrast_strength out, or start the verifier with --amateur"
        )
    if message.score_prompt:
        raise InvalidRequest("score_prompt is true beside contrast_strength; give one of them")
    if (highest := max(message.ids)) >= served.amateur_size:
        raise InvalidRequest(
            f"ids has {highest} beside contrast_strength; the amateur knows ids below {served.amateur_size}"
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


def _criterion(
    message: verifier_pb2.OpenRequest, params: SamplingParams, served: ServedModel, *, speculates: bool
) -> Criterion | None:
    """The request's criterion. Raises InvalidRequest where it cannot hold."""
    if not message.HasField("criterion"):
        return None
    criterion = criterion_from_wire(message.criterion)
    if served.replay_identical:
        raise InvalidRequest(
            "criterion cannot hold on this verifier: its deterministic profile promises to replay ids; "
            "leave criterion out or use another verifier"
        )
    check_criterion(criterion, params, grammar=message.HasField("grammar"), speculates=speculates)
    if criterion.needs_q and served.chains_only:
        raise InvalidRequest(
            f"criterion.{criterion_name(criterion)} judges windows of draws, and {served.model} verifies "
            "chains; leave criterion out"
        )
    # A session that moves goes on without: the law holds, as every token is then the target's own.
    if criterion.needs_q and not message.recovered and not any(source.address for source in message.sources):
        raise InvalidRequest(
            f"criterion.{criterion_name(criterion)} accepts drafts that a drafter drew, and the request has "
            f"no source outside the verifier; attach a drafter, or leave criterion out"
        )
    return criterion


def _check_copied_lengths(message: verifier_pb2.OpenRequest, served: ServedModel) -> None:
    """Raises InvalidRequest for more than the context has room for, before any id becomes a Python object."""
    if (texts := len(message.references)) > MAX_REFERENCES:
        raise InvalidRequest(f"references has {texts} texts; at most {MAX_REFERENCES} are possible")
    given = {
        "prediction": len(message.prediction),
        "references": sum(len(it.ids) for it in message.references),
    }
    if sum(given.values()) >= served.max_length:
        said = " and ".join(f"{name} has {count} ids" for name, count in given.items() if count)
        raise InvalidRequest(f"{said}; together they must have fewer than {served.max_length}")


def _copied_from(name: str, given: Sequence[int], served: ServedModel) -> tuple[int, ...]:
    """The ids of a text to copy from. Raises InvalidRequest for an id that the target does not have."""
    ids = tuple(given)
    if ids and max(ids) >= served.vocabulary_size:
        raise InvalidRequest(
            f"{name} has id {max(ids)}; ids of {served.model} are below {served.vocabulary_size}"
        )
    return ids


def _check_source(source: SourceAddress, served: ServedModel) -> None:
    checked_source_name(source.name)
    if len(source.address) > _MAX_ADDRESS:
        raise InvalidRequest(
            f"the address of source {source.name!r} has {len(source.address)} characters; give host:port, at "
            f"most {_MAX_ADDRESS}"
        )
    if source.address and source.name in served.proposers:
        raise InvalidRequest(
            f"source {source.name!r} has an address, {source.address!r}, but a source inside this worker is "
            f"called so; give it another name"
        )


def _sources(message: verifier_pb2.OpenRequest, served: ServedModel) -> tuple[SourceAddress, ...]:
    """The session's sources, without those that another verifier has inside and this one has not.

    An orchestrator of another release may name what the verifier from which a session comes had.
    """
    if (count := len(message.sources)) > MAX_SOURCES:
        raise InvalidRequest(f"there are {count} sources; at most {MAX_SOURCES}")
    sources = tuple(SourceAddress(source.name, source.address) for source in message.sources)
    for source in sources:
        _check_source(source, served)
    if len({source.name for source in sources}) < len(sources):
        raise InvalidRequest(f"two sources have one name: {', '.join(source.name for source in sources)}")
    return tuple(source for source in sources if source.address or source.name in served.proposers)
