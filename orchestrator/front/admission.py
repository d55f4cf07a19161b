"""Admission: what a client asks for, checked against the target model that will answer.

Every mistake that a client can make is refused here, with the field, its value and what is possible. Checks
are pure, except that they draw a seed and a session name where the client gave none; `Admission` runs them in
order, tokenizes in threads and asks the record of sessions.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.asked_speculation import speculation_of
from orchestrator.front.copied_texts import NO_TEXTS, CopiedTexts, encode_copied, with_document
from orchestrator.front.message_bounds import generate_bounds, most_text_bytes
from orchestrator.front.paid_tokens import RecordedIds, count_unpaid
from outrider.tokens import TokenTable, TooManyTokens
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
from outrider.wire.incoming.shape import Bounds
from outrider.wire.names import MAX_REFERENCES, MAX_SOURCES
from speculative.errors import IdsNeeded, InvalidRequest, Unavailable, UnknownModel
from speculative.grammar import Grammar
from speculative.hashing import prefix_hash
from speculative.params import SEED_BITS, SamplingParams
from speculative.request_bounds import MAX_INTERVAL_MS
from speculative.stop import stop_bytes

IDS_AT_ONCE = 1 << 16
"""Token ids that are made Python objects between two pauses: some 2 ms."""


class Admission:
    """Turns clients' requests into admitted requests.

    Args:
        recorded_ids: looks up generated token ids for `have` that names them by count and hash.
        default_max_tokens: the limit of an answer whose request gives none.
    """

    def __init__(self, fleet: Fleet, recorded_ids: RecordedIds, default_max_tokens: int) -> None:
        self._fleet = fleet
        self._recorded_ids = recorded_ids
        self.default_max_tokens = default_max_tokens

    def target(self, name: str) -> TargetModel:
        """The served model of this name; see choose_target."""
        return choose_target(name, self._fleet.targets(), len(self._fleet.unreached()))

    def targets(self) -> Sequence[TargetModel]:
        """All models that are served. Raises Unavailable where there is none."""
        targets = self._fleet.targets()
        if not targets:
            raise no_verifier()
        return targets

    def bounds(self) -> Bounds:
        """Bounds of a request whose model is not known yet. Raises Unavailable where no model is served."""
        return generate_bounds(self.targets())

    async def admit(
        self, start: generation_pb2.GenerateStart, owner: str = ""
    ) -> tuple[AdmittedRequest, TargetModel]:
        """Check a request; returns it with the model that will answer it. Raises OutriderError.

        Args:
            owner: what stands before the session's name inside.
        """
        key = session_key(start, owner)
        target = self.target(start.model)
        _check_counts(start, target)
        ids = await _prompt_ids(start, target)
        have = await had_ids(start, key, ids, self._recorded_ids)
        copied = await _copied(start, target)
        request = admit(start, key, ids, target, self.default_max_tokens, copied, have)
        if request.have is None:  # verifiers take what was decoded before beyond their capacity
            self.check_room(request, target)
        return replace(request, unpaid=await count_unpaid(request, self._recorded_ids)), target

    def check_room(self, request: AdmittedRequest, target: TargetModel) -> None:
        """Raises InvalidRequest for a new request that no verifier could take, however idle."""
        most = self._fleet.most_choices(target.name)
        if request.choices > most > 0:
            raise InvalidRequest(
                f"n is {request.choices}; no verifier of model {target.name!r} decodes more than {most} at "
                "once, and one verifier decodes all choices of a request: ask for fewer"
            )


def session_key(start: generation_pb2.GenerateStart, owner: str = "") -> SessionKey:
    """The key of the session that the client names, or of a new session. Raises InvalidRequest."""
    named = start.session or f"s-{secrets.token_hex(8)}"
    return SessionKey(checked_tenant(start.tenant), owned_session(named, owner))


def owned_session(named: str, owner: str) -> str:
    """The name inside of a session that a client names; `owner` is its Caller's. Raises InvalidRequest."""
    return checked_session(owner + checked_session(named))


def choose_target(name: str, targets: Sequence[TargetModel], unreached: int) -> TargetModel:
    """The target of this name, or the only target where the name is empty.

    `unreached` verifiers have not described themselves yet. Raises Unavailable where no
    verifier has, UnknownModel where none serves the name, InvalidRequest where a name is needed.
    """
    served = {target.name: target for target in targets}
    if not served:
        raise no_verifier()
    if name in served:
        return served[name]
    names = ", ".join(sorted(served))
    if name:
        silent = f"; verifiers not reached yet: {unreached}" if unreached else ""
        raise UnknownModel(f"no model {name!r} here; served: {names}{silent}")
    if len(served) > 1:
        raise InvalidRequest(f"model must be given, as several are served: {names}")
    return next(iter(served.values()))


def no_verifier() -> Unavailable:
    """The error where no verifier has described itself. Their addresses are none of the client's business."""
    return Unavailable("no verifier can be reached; try again")


async def encode_prompt(text: str, target: TargetModel, *, add_special: bool = True) -> list[int]:
    """Token ids of a prompt's text, tokenized in a thread. Raises InvalidRequest for an invalid prompt."""
    tokens, most = check_text(text, target), target.max_length - 1
    try:
        return await asyncio.to_thread(tokens.encode, text, add_special=add_special, most=most)
    except TooManyTokens as error:
        raise _no_room(f"at least {error.count}", target) from None


def check_text(text: str, target: TargetModel) -> TokenTable:
    """The tokenizer for this prompt. Raises InvalidRequest for text that cannot be a prompt here."""
    if target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: give ids, not text")
    if not text:
        raise InvalidRequest("the prompt's text is empty")
    _check_size("the prompt's text", text, target)
    return target.tokens


async def had_ids(
    start: generation_pb2.GenerateStart, key: SessionKey, prompt: Sequence[int], recorded_ids: RecordedIds
) -> list[tuple[int, ...]]:
    """The token ids of every `have`, those on record where an entry names them by count and hash.

    The record of tokens need not reach that far; then the client, which has the ids, is asked to send them.
    Raises InvalidRequest where an entry gives ids and a count, IdsNeeded where the record lacks the ids.
    """
    found = []
    for choice, have in enumerate(start.have):
        if not have.count or choice in start.ended:
            found.append(await _as_tuple(have.ids))
            continue
        if have.ids:
            raise InvalidRequest(f"have[{choice}] has both ids and a count; give one of them")
        recorded = tuple(await recorded_ids(key._replace(choice=choice)))[: have.count]
        if len(recorded) < have.count or prefix_hash([*prompt, *recorded]) != have.prefix_hash:
            raise IdsNeeded(
                f"the first {have.count} ids of choice {choice} of session {key.session!r} are not on record "
                "here as the request has them; ask again with the ids in `have`"
            )
        found.append(recorded)
        await asyncio.sleep(0)  # a hash over a long prompt takes milliseconds
    return found


def admit(
    start: generation_pb2.GenerateStart,
    key: SessionKey,
    ids: Sequence[int],
    target: TargetModel,
    default_max_tokens: int,
    copied: CopiedTexts = NO_TEXTS,
    have: Sequence[tuple[int, ...]] = (),
) -> AdmittedRequest:
    """Check a request and make it an AdmittedRequest. Raises InvalidRequest.

    Args:
        ids: token ids of the prompt.
        copied: token ids of the texts that the answer may copy from.
        have: token ids of each entry of the request's `have`.
    """
    _check_ids(ids, target)
    max_tokens = _max_tokens(start, len(ids), target, default_max_tokens)
    params = sampling_from_wire(start.sampling, target.vocabulary_size)
    params.check_stops(max_tokens)
    return AdmittedRequest(
        key=key,
        ids=tuple(ids),
        limit=len(ids) + max_tokens,
        params=params,
        seed=start.seed if start.HasField("seed") else secrets.randbits(SEED_BITS),
        stops=_stops(start.stop, target),
        speculation=speculation_of(start, copied, params, target),
        choices=_choices(start),
        logprobs=logprobs_from_wire(start.logprobs) if start.HasField("logprobs") else None,
        have=_have(start, have, max_tokens, target),
        seen_epoch=start.seen_epoch,
        ended=_ended(start),
        resumable=start.resumable,
        grammar=_grammar(start, params, target),
        device=_device(start),
        message_interval_ms=_message_interval_ms(start),
    )


def _device(start: generation_pb2.GenerateStart) -> bool:
    """Whether the client's device drafts. Raises InvalidRequest where the request turns drafting off."""
    if not start.HasField("device"):
        return False
    asked = start.speculation
    if asked.HasField("enabled") and not asked.enabled:
        raise InvalidRequest("device is set, but speculation.enabled is false: leave one of the two out")
    if asked.HasField("node_limit") and asked.node_limit == 0:
        raise InvalidRequest("device is set, but speculation.node_limit is 0: leave one of the two out")
    return True


def _message_interval_ms(start: generation_pb2.GenerateStart) -> int:
    """Least milliseconds between two messages of a choice's tokens. Raises InvalidRequest."""
    asked = start.message_interval_ms
    if asked > MAX_INTERVAL_MS:
        raise InvalidRequest(f"message_interval_ms is {asked}; at most {MAX_INTERVAL_MS} are possible")
    if asked and start.HasField("device"):
        raise InvalidRequest(
            f"message_interval_ms is {asked}, but a device drafts, which needs tokens at once: leave one of "
            "the two out"
        )
    return asked


def _check_size(what: str, text: str, target: TargetModel) -> None:
    """Raises InvalidRequest for text that cannot fit the target's context."""
    most = most_text_bytes(target)
    # Characters are counted first: their number is known, the number of bytes is not.
    size, unit = (len(text), "characters") if len(text) > most else (len(text.encode()), "bytes")
    if size > most:
        raise InvalidRequest(
            f"{what} has {size} {unit}, more than the context of {target.max_length} ids can hold "
            f"(at most {most} bytes)"
        )


def _no_room(count: str, target: TargetModel) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {count} ids, which leaves no room in the context of {target.max_length}"
    )


async def _prompt_ids(start: generation_pb2.GenerateStart, target: TargetModel) -> Sequence[int]:
    """Token ids of the prompt, as the client gave them or tokenized."""
    if start.WhichOneof("prompt") is None:
        raise InvalidRequest("there is no prompt: give text or ids")
    if start.HasField("ids"):
        return await _as_tuple(start.ids.ids)
    return await encode_prompt(start.text, target)


async def _copied(start: generation_pb2.GenerateStart, target: TargetModel) -> CopiedTexts:
    """Token ids of the texts that the answer may copy from. Raises InvalidRequest."""
    asked = start.speculation
    if asked.edit and not start.HasField("text"):
        raise InvalidRequest("speculation.edit is true beside a prompt of ids; give the prompt as text")
    copied = await encode_copied(asked.prediction, asked.references, target)
    return await with_document(copied, start.text, target) if asked.edit else copied


async def _as_tuple(ids: Sequence[int]) -> tuple[int, ...]:
    """The ids of a message as Python objects, made in pieces so that no piece holds the event loop up."""
    if len(ids) <= IDS_AT_ONCE:
        return tuple(ids)
    made: list[int] = []
    for start in range(0, len(ids), IDS_AT_ONCE):
        made += ids[start : start + IDS_AT_ONCE]
        await asyncio.sleep(0)
    return tuple(made)


def _check_counts(start: generation_pb2.GenerateStart, target: TargetModel) -> None:
    """Raises InvalidRequest where a repeated field has more entries than any request to the target can.

    For a look before the entries become Python objects. Closer bounds are checked afterwards.
    """
    for name, count in (("have", len(start.have)), ("ended", len(start.ended))):
        if count > MAX_CHOICES:
            raise InvalidRequest(f"{name} has {count} entries; a request has at most {MAX_CHOICES} choices")
    for choice, have in enumerate(start.have):
        if len(have.ids) > target.max_length:
            raise InvalidRequest(
                f"have[{choice}] has {len(have.ids)} ids, more than the context of {target.max_length}"
            )
    if (count := len(start.speculation.references)) > MAX_REFERENCES:
        raise InvalidRequest(f"references has {count} texts; at most {MAX_REFERENCES} are possible")
    if (count := len(start.speculation.sources)) > MAX_SOURCES:
        raise InvalidRequest(f"speculation.sources has {count} names; at most {MAX_SOURCES} are possible")
    if start.HasField("ids"):
        _check_length(len(start.ids.ids), target)


def _check_length(count: int, target: TargetModel) -> None:
    if not count:
        raise InvalidRequest("the prompt is empty: it has no ids")
    if count >= target.max_length:
        raise _no_room(str(count), target)


def _check_ids(ids: Sequence[int], target: TargetModel) -> None:
    _check_length(len(ids), target)
    if max(ids) >= target.vocabulary_size:
        place = next(place for place, id_ in enumerate(ids) if id_ >= target.vocabulary_size)
        raise InvalidRequest(
            f"the prompt's id {ids[place]} (number {place}) is outside the vocabulary: "
            f"ids are below {target.vocabulary_size}"
        )


def _max_tokens(start: generation_pb2.GenerateStart, prompt: int, target: TargetModel, default: int) -> int:
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
    start: generation_pb2.GenerateStart,
    have: Sequence[tuple[int, ...]],
    max_tokens: int,
    target: TargetModel,
) -> tuple[tuple[int, ...], ...] | None:
    """Generated token ids that the client has of each choice; None if the request resumes none."""
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
    for choice, ids in enumerate(have):
        if len(ids) > max_tokens:
            raise InvalidRequest(f"have[{choice}] has {len(ids)} ids, more than max_tokens, {max_tokens}")
        if ids and max(ids) >= target.vocabulary_size:
            wrong = next(id_ for id_ in ids if id_ >= target.vocabulary_size)
            raise InvalidRequest(
                f"have[{choice}] has {wrong}; ids of {target.name} are below {target.vocabulary_size}"
            )
    return tuple(have)


def _ended(start: generation_pb2.GenerateStart) -> frozenset[int]:
    """Choices that the client has to their end, and that are not resumed."""
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


def _stops(stops: Sequence[str], target: TargetModel) -> tuple[str, ...]:
    if stops and target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: stop strings are not possible")
    stop_bytes(stops)
    return tuple(stops)


def _grammar(
    start: generation_pb2.GenerateStart, params: SamplingParams, target: TargetModel
) -> Grammar | None:
    """The request's grammar, if any. The verifier finds out whether it compiles."""
    if not start.HasField("grammar"):
        return None
    grammar = grammar_from_wire(start.grammar)
    grammar.check_with(params)
    if target.tokens is None:
        raise InvalidRequest(f"model {target.name!r} has no tokenizer: {grammar.kind} is not possible")
    return grammar
