"""What a client asked for, checked against the target that will answer.

Everything that a client can get wrong is refused here, with the field, the value and what is possible. Pure
but for the seed and the session's name, which are drawn where the client left them out.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from orchestrator.front.speculation import Speculation, checked_speculation
from outrider.tokens import ChatTemplate, TokenTable
from outrider.v1 import generation_pb2
from outrider.wire.codec import (
    MAX_CHOICES,
    SessionKey,
    checked_session,
    checked_tenant,
    grammar_from_wire,
    logprobs_from_wire,
    sampling_from_wire,
)
from speculative.commit import stop_bytes
from speculative.errors import InvalidRequest, Unavailable, UnknownModel
from speculative.grammar import Grammar
from speculative.logprobs import Logprobs
from speculative.noise import derive
from speculative.params import SamplingParams

MARKED_IDS = 256
"""The prompt's last ids, by which a request is told from others: enough, and quick for any length."""
LEAST_TOKEN_BYTES = 64
"""A prompt is refused unread only where even ids of this many bytes would not fit it into the context: a
special token's text, or text that the tokenizer normalises away, may be longer than any id's own bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is served, as its verifier describes it."""

    name: str
    max_length: int
    vocabulary_size: int
    tokenizer_digest: str
    tokens: TokenTable | None
    local_sources: tuple[str, ...]
    chat: ChatTemplate | None = None
    """How a conversation becomes a prompt; None: it cannot."""
    weights_digest: str = ""
    """Of which weights it is; empty: not known."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that can be decoded."""

    key: SessionKey
    ids: tuple[int, ...]
    """The prompt."""
    limit: int
    """The most ids in all, an absolute position."""
    params: SamplingParams
    seed: int
    """Of choice 0; the others' are derived from it."""
    stops: tuple[str, ...]
    speculation: Speculation
    choices: int = 1
    """How many answers, each a session of its own."""
    logprobs: Logprobs | None = None
    """What is told of generated ids; None: nothing."""
    have: tuple[tuple[int, ...], ...] | None = None
    """Generated ids that the client has, by choice, where the request goes on with an earlier one."""
    seen_epoch: int = 0
    """The highest that the client has seen of it."""
    ended: frozenset[int] = frozenset()
    """Choices whose end the client has been told, likewise."""
    resumable: bool = False
    """Whether a disconnect leaves it to be gone on with."""
    grammar: Grammar | None = None
    """What the text has to be; None: anything."""

    @property
    def keys(self) -> tuple[SessionKey, ...]:
        """Of the choices' sessions."""
        return tuple(self.key._replace(choice=choice) for choice in range(self.choices))

    @property
    def mark(self) -> int:
        """64 bits, not 0: the same for this request wherever and however often it is asked, hardly ever for
        another. Tells it from the session's other ones, which epochs do not where clocks differ."""
        told = (self.seed, len(self.ids), *self.ids[-MARKED_IDS:])
        return int.from_bytes(blake2b(pack(f"<{len(told)}Q", *told), digest_size=8).digest()) or 1

    def seed_of(self, choice: int) -> int:
        """The choice's own randomness."""
        return derive(self.seed, choice)


def session_key(start: generation_pb2.GenerateStart) -> SessionKey:
    """As the client named it, or a new name. Raises InvalidRequest where a name cannot be one."""
    session = start.session or f"s-{secrets.token_hex(8)}"
    return SessionKey(checked_tenant(start.tenant), checked_session(session))


def choose_target(name: str, targets: Sequence[Target], unreached: Sequence[str]) -> Target:
    """The target of this name, or the only one where the name is empty.

    `unreached` are addresses of verifiers that have not said yet what they serve. Raises Unavailable where
    none has, UnknownModel where nobody serves the name, InvalidRequest where a name is needed.
    """
    served = {target.name: target for target in targets}
    if not served:
        raise Unavailable(f"no verifier can be reached ({', '.join(unreached)}); try again")
    if name in served:
        return served[name]
    names = ", ".join(sorted(served))
    if name:
        silent = f"; not reached yet: {', '.join(unreached)}" if unreached else ""
        raise UnknownModel(f"no model {name!r} here; served: {names}{silent}")
    if len(served) > 1:
        raise InvalidRequest(f"model must be given, as several are served: {names}")
    return next(iter(served.values()))


def check_text(text: str, target: Target) -> TokenTable:
    """The tokenizer for this prompt. Raises InvalidRequest where it cannot be a prompt of this target."""
    if target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: give ids, not text")
    if not text:
        raise InvalidRequest("the prompt's text is empty")
    size = len(text.encode())
    most = target.max_length * max(target.tokens.longest_token_bytes, LEAST_TOKEN_BYTES)
    if size > most:
        raise InvalidRequest(
            f"the prompt's text has {size} bytes, more than the context of {target.max_length} ids can hold "
            f"(at most {most})"
        )
    return target.tokens


def admit(
    start: generation_pb2.GenerateStart,
    key: SessionKey,
    ids: Sequence[int],
    target: Target,
    default_max_tokens: int,
    prediction: Sequence[int] = (),
) -> Admitted:
    """The request, checked. `ids` is its prompt, `prediction` that, tokenized. Raises InvalidRequest."""
    _check_ids(ids, target)
    max_tokens = _max_tokens(start, len(ids), target, default_max_tokens)
    params = sampling_from_wire(start.sampling, target.vocabulary_size)
    params.check_ending(max_tokens)
    return Admitted(
        key=key,
        ids=tuple(ids),
        limit=len(ids) + max_tokens,
        params=params,
        seed=start.seed if start.HasField("seed") else secrets.randbits(64),
        stops=_stops(start.stop, target),
        speculation=checked_speculation(start.speculation, prediction),
        choices=_choices(start),
        logprobs=logprobs_from_wire(start.logprobs) if start.HasField("logprobs") else None,
        have=_have(start, max_tokens, target),
        seen_epoch=start.seen_epoch,
        ended=_ended(start),
        resumable=start.resumable,
        grammar=_grammar(start, params, target),
    )


def _check_ids(ids: Sequence[int], target: Target) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty: it has no ids")
    if len(ids) >= target.max_length:
        raise InvalidRequest(
            f"the prompt has {len(ids)} ids, which leaves no room in the context of {target.max_length}"
        )
    if max(ids) >= target.vocabulary_size:
        place = next(place for place, id_ in enumerate(ids) if id_ >= target.vocabulary_size)
        raise InvalidRequest(
            f"the prompt's id {ids[place]} (number {place}) is outside the vocabulary: "
            f"ids are below {target.vocabulary_size}"
        )


def _max_tokens(start: generation_pb2.GenerateStart, prompt: int, target: Target, default: int) -> int:
    possible = target.max_length - prompt
    if not start.HasField("max_tokens"):
        return min(default, possible)
    if not 1 <= start.max_tokens <= possible:
        raise InvalidRequest(
            f"max_tokens is {start.max_tokens}; 1 to {possible} are possible: the context of "
            f"{target.max_length} less the prompt's {prompt}"
        )
    return start.max_tokens


def _choices(start: generation_pb2.GenerateStart) -> int:
    if not start.HasField("n"):
        return 1
    if not 1 <= start.n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {start.n}; 1 to {MAX_CHOICES} are possible")
    return start.n


def _have(
    start: generation_pb2.GenerateStart, max_tokens: int, target: Target
) -> tuple[tuple[int, ...], ...] | None:
    """What the client has of each choice; None where the request is a new one."""
    if not start.have:
        if start.seen_epoch:
            raise InvalidRequest("seen_epoch is given without `have`: it says where a request goes on")
        return None
    if not start.HasField("seed") or not start.session:
        raise InvalidRequest("`have` needs the session and the seed that `started` named")
    if len(start.have) != (choices := _choices(start)):
        raise InvalidRequest(
            f"`have` has {len(start.have)} entries; one is needed for each of {choices} choices"
        )
    have = tuple(tuple(ids.ids) for ids in start.have)
    for choice, ids in enumerate(have):
        if len(ids) > max_tokens:
            raise InvalidRequest(f"have[{choice}] has {len(ids)} ids, more than max_tokens, {max_tokens}")
        if wrong := [id_ for id_ in ids if id_ >= target.vocabulary_size]:
            raise InvalidRequest(
                f"have[{choice}] has {wrong[0]}; ids of {target.name} are below {target.vocabulary_size}"
            )
    return have


def _ended(start: generation_pb2.GenerateStart) -> frozenset[int]:
    """Choices that are not gone on with."""
    ended, choices = frozenset(start.ended), _choices(start)
    if not ended:
        return ended
    if not start.have:
        raise InvalidRequest("ended is given without `have`: it says where a request goes on")
    if max(ended) >= choices:
        raise InvalidRequest(f"ended has {max(ended)}; the request has choices 0 to {choices - 1}")
    if len(ended) == choices:
        raise InvalidRequest(f"ended has all {choices} choices: the client has the whole answer")
    return ended


def _stops(stops: Sequence[str], target: Target) -> tuple[str, ...]:
    if stops and target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: stop strings are not possible")
    stop_bytes(stops)
    return tuple(stops)


def _grammar(start: generation_pb2.GenerateStart, params: SamplingParams, target: Target) -> Grammar | None:
    """Whether it can be compiled is for the verifier to see."""
    if not start.HasField("grammar"):
        return None
    grammar = grammar_from_wire(start.grammar)
    grammar.check_with(params)
    if target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: {grammar.kind} is not possible")
    return grammar
