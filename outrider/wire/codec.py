"""Converts protobuf messages to values of the core and back.

Receiving checks ranges, and errors name the field and the value; sending trusts the values of this process.
This module knows nothing of sockets, sessions or models.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Literal, NamedTuple, get_args

from outrider.v1 import common_pb2, draft_source_pb2, generation_pb2
from outrider.wire.criteria import promise_to_wire
from outrider.wire.drawn import laws_to_wire, window_from_wire
from speculative.draft import MAX_DRAFT_NODES
from speculative.drawn_window import DrawnWindow
from speculative.errors import InvalidRequest, MalformedDraft
from speculative.fragment import Fragment
from speculative.grammar import Grammar, GrammarKind
from speculative.logprobs import Logprobs, LogprobsOf, TokenLogprob
from speculative.params import SamplingParams, check_bias_count, check_stop_count
from speculative.stats import UsageCount
from speculative.stop import FinishReason

MAX_NAME = 128
MAX_CHOICES = 16
WHOLE_ANSWER_INTERVAL_MS = 200
"""Milliseconds between two messages of an answer that nobody reads before its end. What was not sent when a
verifier is lost is decoded again."""
FULL = 255


class SessionKey(NamedTuple):
    """Identity of a sequence, unique in a deployment: tenant, session and choice."""

    tenant: str
    session: str
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.tenant}/{self.session}#{self.choice}"

    @property
    def fields(self) -> dict[str, str | int]:
        """The key as fields of log lines."""
        return {"tenant": self.tenant, "session": self.session, "choice": self.choice}


def key_to_wire(key: SessionKey) -> common_pb2.SessionKey:
    return common_pb2.SessionKey(tenant=key.tenant, session=key.session, choice=key.choice)


def key_from_wire(message: common_pb2.SessionKey) -> SessionKey:
    """A key from the wire. Raises InvalidRequest for an invalid name or a choice beyond MAX_CHOICES."""
    if message.choice >= MAX_CHOICES:
        raise InvalidRequest(f"choice is {message.choice}; 0 to {MAX_CHOICES - 1} are possible")
    return SessionKey(checked_tenant(message.tenant), checked_session(message.session), message.choice)


def checked_tenant(tenant: str) -> str:
    """The tenant. Raises InvalidRequest above 128 characters, and for characters that cannot be printed."""
    if len(tenant) > MAX_NAME:
        raise InvalidRequest(f"tenant has {len(tenant)} characters; at most {MAX_NAME}")
    return _printable("tenant", tenant)


def checked_session(session: str) -> str:
    """The session's name. Raises InvalidRequest unless it has 1 to 128 printable characters."""
    if not 1 <= len(session) <= MAX_NAME:
        raise InvalidRequest(f"session has {len(session)} characters; 1 to {MAX_NAME} are needed")
    return _printable("session", session)


def _printable(field: str, name: str) -> str:
    if not name.isprintable():
        raise InvalidRequest(f"{field} {name!r} has characters that cannot be printed")
    return name


_PLAIN = SamplingParams()
_Scalar = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "contrast_strength",
    "contrast_plausibility",
]
_SCALARS: tuple[_Scalar, ...] = get_args(_Scalar)


def sampling_to_wire(params: SamplingParams) -> common_pb2.Sampling:
    """Sampling parameters for the wire, without fields at their default."""
    message = common_pb2.Sampling()
    for name in _SCALARS:
        value = getattr(params, name)
        if value != getattr(_PLAIN, name):
            setattr(message, name, value)
    for id_, bias in params.logit_bias:
        message.logit_bias[id_] = bias
    message.stop_ids.extend(params.stop_ids)
    return message


def sampling_from_wire(message: common_pb2.Sampling, vocabulary_size: int | None = None) -> SamplingParams:
    """Sampling parameters. Raises InvalidRequest for a field out of range or ids beyond the vocabulary."""
    check_bias_count(len(message.logit_bias))
    check_stop_count(len(message.stop_ids))
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    if "contrast_plausibility" in given and not given.get("contrast_strength"):
        raise InvalidRequest(
            f"contrast_plausibility is {given['contrast_plausibility']:g} without a contrast_strength above "
            "0; give both, or the strength alone"
        )
    biases = tuple(message.logit_bias.items())
    params = SamplingParams(**given, logit_bias=biases, stop_ids=tuple(message.stop_ids))
    if vocabulary_size is not None:
        params.check_vocabulary(vocabulary_size)
    return params


_DISTRIBUTIONS = {
    LogprobsOf.RAW: common_pb2.LOGPROBS_OF_RAW,
    LogprobsOf.PROCESSED: common_pb2.LOGPROBS_OF_PROCESSED,
}
_DISTRIBUTIONS_BACK = {number: of for of, number in _DISTRIBUTIONS.items()}
_DISTRIBUTIONS_BACK[common_pb2.LOGPROBS_OF_UNSPECIFIED] = LogprobsOf.RAW


def logprobs_to_wire(asked: Logprobs) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(top_logprobs=asked.top_logprobs, logprobs_of=_DISTRIBUTIONS[asked.logprobs_of])


def logprobs_from_wire(message: common_pb2.Logprobs) -> Logprobs:
    """The log-probability options of a request. Raises InvalidRequest for a field that is out of range."""
    of = _DISTRIBUTIONS_BACK.get(message.logprobs_of)
    if of is None:
        raise InvalidRequest(f"logprobs_of is {message.logprobs_of}; 1 (raw) and 2 (processed) are possible")
    return Logprobs(message.top_logprobs, of)


def grammar_to_wire(grammar: Grammar) -> common_pb2.Grammar:
    message = common_pb2.Grammar(preamble=grammar.preamble)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            message.json_schema = grammar.text
        case GrammarKind.REGEX:
            message.regex = grammar.text
        case GrammarKind.JSON_OBJECT:
            message.json_object = True
        case GrammarKind.CHOICE:
            message.choice.texts.extend(grammar.texts())
        case GrammarKind.LARK:
            message.lark = grammar.text
    return message


def grammar_from_wire(message: common_pb2.Grammar) -> Grammar:
    """A grammar from the wire. Raises InvalidRequest for one that is too large, invalid or absent."""
    preamble = message.preamble
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema, preamble)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex, preamble)
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT, preamble=preamble)
        case "choice":
            return replace(Grammar.one_of(message.choice.texts), preamble=preamble)
        case "lark":
            return Grammar(GrammarKind.LARK, message.lark, preamble)
    raise InvalidRequest(f"grammar is empty; give one of {', '.join(GrammarKind)}")


def token_logprob_to_wire(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs
    )


def fragment_to_wire(fragment: Fragment, alias: int) -> draft_source_pb2.Draft:
    """A fragment for the wire. Survival is rounded to 1/255; a survival above 0 stays above 0."""
    chain = all(parent == node - 1 for node, parent in enumerate(fragment.parents))
    window = fragment if isinstance(fragment, DrawnWindow) else None
    survival = () if window else fragment.survival
    return draft_source_pb2.Draft(
        alias=alias,
        epoch=fragment.epoch,
        base=fragment.base,
        prefix_hash=fragment.prefix_hash,
        ids=fragment.tokens,
        parents=b"" if chain else bytes(parent + 1 for parent in fragment.parents),
        survival=bytes(max(1, round(share * FULL)) if share > 0 else 0 for share in survival),
        q=laws_to_wire(window.laws) if window else b"",
        whole=window is not None,
    )


def fragment_from_wire(
    draft: draft_source_pb2.Draft | generation_pb2.DeviceDrafts, source: int, epoch: int | None = None
) -> Fragment:
    """A peer's draft as a fragment of `source` (the receiver's own index for that peer, from 1).

    A whole window becomes a DrawnWindow. `epoch` replaces the draft's own, which a device need not repeat.
    Raises MalformedDraft where the counts do not fit, a parent does not precede its child, or q is no
    distribution from which the nodes can have been drawn.
    """
    count = len(draft.ids)
    if count > MAX_DRAFT_NODES:  # before anything of that size is made
        raise MalformedDraft(f"a draft has {count} nodes; send 1 to {MAX_DRAFT_NODES}")
    for name, size in (("parents", len(draft.parents)), ("survival", len(draft.survival))):
        if size not in (0, count):
            raise MalformedDraft(f"a draft of {count} nodes has {size} bytes of {name}; send none or {count}")
    q, whole = (draft.q, draft.whole) if isinstance(draft, draft_source_pb2.Draft) else (b"", False)
    drawn = whole or bool(q)
    fragment = Fragment(
        source=source,
        epoch=draft.epoch if epoch is None else epoch,
        base=draft.base,
        prefix_hash=draft.prefix_hash,
        tokens=tuple(draft.ids),
        parents=tuple(byte - 1 for byte in draft.parents) if draft.parents else tuple(range(-1, count - 1)),
        survival=(1.0,) * count if drawn else tuple(byte / FULL for byte in draft.survival),
    )
    return window_from_wire(fragment, q, whole=whole) if drawn else fragment


def source_index_from_wire(
    response: draft_source_pb2.AttachResponse, place: int, source_indices: Sequence[int]
) -> int:
    """The source index of the draft at this place, among the receiver's indices for the peer's names.

    Raises MalformedDraft where the message gives no source for the draft, or a name that was not requested.
    """
    if not response.sources:
        return source_indices[0]
    if len(response.sources) != len(response.drafts):
        raise MalformedDraft(
            f"{len(response.drafts)} drafts have {len(response.sources)} sources; send as many"
        )
    if response.sources[place] >= len(source_indices):
        raise MalformedDraft(f"a draft is of source {response.sources[place]} of {len(source_indices)}")
    return source_indices[response.sources[place]]


def usage_to_wire(usage: UsageCount) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        rounds=usage.rounds,
        accepted_by_source=usage.accepted,
        drafted_by_source=usage.drafted,
        admitted=usage.admitted,
        replay_identical=usage.replay_identical,
        cached_tokens=usage.cached_tokens,
        promise=promise_to_wire(usage.promise),
    )


_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def finish_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """A finish reason for the wire; None stands for a request that has not ended."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _REASONS[reason]


def finish_from_wire(number: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """A finish reason from the wire. A number of a newer contract becomes ERROR: the request has ended."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _REASONS_BACK.get(number, FinishReason.ERROR)


class CommittedCode(IntEnum):
    """Values of `Committed.code`, gRPC's numbers: why the verifier sends no more tokens of a session."""

    NONE = 0
    """The session goes on, or ended as its finish reason says."""
    DEAD_END = 3
    """INVALID_ARGUMENT: the request's grammar leaves no token; the message beside the code says why."""
    UNKNOWN_SESSION = 5
    """NOT_FOUND: this verifier has no such session."""
    TAKEN_OVER = 10
    """ABORTED: the session was opened under a higher epoch, here or elsewhere."""
    BUG = 13
    """INTERNAL: the verifier failed at this session; the message beside the code says how."""


def epoch_to_text(epoch: int) -> str:
    """An epoch as 16 hexadecimal digits: of fixed width, so that texts sort as epochs do."""
    return f"{epoch:016x}"


def epoch_from_text(text: str) -> int:
    """An epoch from its text. Raises ValueError for anything but 16 hexadecimal digits."""
    if len(text) != 16:
        raise ValueError(f"an epoch has 16 hexadecimal digits, not {text!r}")
    return int(text, 16)
