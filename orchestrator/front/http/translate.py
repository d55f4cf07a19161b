"""Translates an HTTP body into the message that a gRPC client would have sent. Pure.

So one set of checks serves both fronts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import admit, session_key
from orchestrator.front.copied_texts import NO_TEXTS, CopiedTexts
from orchestrator.front.http.bodies.reading import schema_text
from orchestrator.front.http.chat.chat_fields import ChatFields
from orchestrator.front.http.chat.families import format_named
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.errors import param_of
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.fields import (
    CompletionFields,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from orchestrator.front.http.templated.special_marks import parsed_marks, special_marks
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import WHOLE_ANSWER_INTERVAL_MS, grammar_to_wire
from outrider.wire.criteria import criterion_of
from speculative.errors import InvalidRequest
from speculative.grammar import Grammar, GrammarKind


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """Values of the fields that a body over HTTP leaves out, where the server chooses them."""

    max_tokens: int
    """The most tokens of a completed text."""
    chat_max_tokens: int | None
    """The most tokens of a chat answer; None: as many as the context has room for."""
    generation_config: bool
    """Whether the model's own generation config says how to sample."""

    def limit(self, body: GenerationFields, target: TargetModel) -> int:
        """The most tokens of an answer to this body; the context may have room for fewer."""
        if not isinstance(body, ChatFields):
            return self.max_tokens
        return target.max_length if self.chat_max_tokens is None else self.chat_max_tokens

    def sampling(self, asked: common_pb2.Sampling, target: TargetModel) -> common_pb2.Sampling:
        """The parameters that a body asks for, and the model's own where the body asks for none."""
        merged = common_pb2.Sampling()
        if self.generation_config:
            merged.CopyFrom(target.sampling_defaults)
        merged.MergeFrom(asked)
        return merged


def check_together(body: GenerationFields, suffix: str | None) -> None:
    """Check that no field is given without the field that gives it a meaning. Raises FieldRefused.

    `suffix` is the body's, which large bodies bring apart.
    """
    if body.stream_options is not None and not body.stream:
        raise FieldRefused("stream_options", "stream_options is given without stream: true")
    metrics_wanted = body.per_request_spec_decode_metrics not in (None, "none")
    if body.stream and metrics_wanted and not wants_usage(body):
        raise FieldRefused(
            "per_request_spec_decode_metrics",
            "per_request_spec_decode_metrics is sent with the usage; give stream_options.include_usage: true",
        )
    if isinstance(body, CompletionFields) and body.echo:
        for other, given in (("suffix", suffix), ("return_token_ids", body.return_token_ids)):
            if given:
                raise FieldRefused("echo", f"echo is given beside {other}; give one of them")
        if scores_prompt(body) and body.contrast_strength:
            raise FieldRefused(
                "contrast_strength",
                f"contrast_strength is {body.contrast_strength:g} beside echo with logprobs, which scores "
                "the prompt without contrast; leave contrast_strength or logprobs out",
            )
    if isinstance(body, ChatFields):
        if body.top_logprobs is not None and not body.logprobs:
            raise FieldRefused("top_logprobs", "top_logprobs is given without logprobs: true")
        if None not in (both := (body.max_tokens, body.max_completion_tokens)) and both[0] != both[1]:
            raise FieldRefused(
                "max_tokens", f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; give one"
            )


def within_context(
    body: CompletionFields | ChatFields, prompt_tokens: int, target: TargetModel
) -> CompletionFields | ChatFields:
    """The body with as many tokens of the answer as the context leaves, where it asks for more.

    A prompt that leaves none is left to the admission, which refuses it.
    """
    room = target.max_length - prompt_tokens
    if body.max_tokens is None or not 0 < room < body.max_tokens:
        return body
    return body.model_copy(update={"max_tokens": room})


def wants_usage(body: GenerationFields) -> bool:
    """Whether the client wants a stream to end with the usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


def admitted(
    body: GenerationFields,
    ids: Sequence[int],
    target: TargetModel,
    seed: int,
    tenant: str,
    session: str,
    defaults: AnswerDefaults,
    copied: CopiedTexts = NO_TEXTS,
    plan: ChatPlan | None = None,
) -> AdmittedRequest:
    """The request for one prompt of the body, checked. Raises InvalidRequest.

    Args:
        ids: token ids of the prompt.
        session: the name of the request's session.
        defaults: what fields that the body leaves out stand for.
        copied: token ids of the texts that the answer may copy from.
        plan: the plan of a conversation's answer.
    """
    start = _start(body, seed, tenant, session)
    if plan is not None and plan.grammar:
        if start.HasField("grammar"):
            raise FieldRefused(
                "tool_choice",
                "tool_choice asks for a call, and the body gives another format too; leave one out",
            )
        start.grammar.CopyFrom(grammar_to_wire(Grammar(GrammarKind.LARK, plan.grammar)))
    if plan is not None and plan.preamble:
        start.grammar.preamble = plan.preamble
    start.sampling.CopyFrom(defaults.sampling(start.sampling, target))
    request = admit(start, session_key(start), ids, target, defaults.limit(body, target), copied)
    interval_ms = 0 if body.stream else WHOLE_ANSWER_INTERVAL_MS
    request = replace(request, shown_ids=_shown_ids(plan, target), message_interval_ms=interval_ms)
    if not scores_prompt(body):
        return request
    return replace(request, score_prompt=True, speculation=replace(request.speculation, enabled=False))


def echoes(body: GenerationFields) -> bool:
    """Whether the answer begins with the prompt."""
    return isinstance(body, CompletionFields) and bool(body.echo)


def scores_prompt(body: GenerationFields) -> bool:
    """Whether the prompt's tokens have log-probabilities, too."""
    return isinstance(body, CompletionFields) and bool(body.echo) and body.logprobs is not None


def prompt_alone(body: GenerationFields) -> bool:
    """Whether the client wants the prompt back, and no token behind it.

    One token is generated all the same, and dropped: the prompt's last row is computed in any case.
    """
    return echoes(body) and body.max_tokens == 0


def renamed(error: InvalidRequest, body: GenerationFields | None) -> InvalidRequest:
    """The refusal with the field's name as the body has it, where a field has two names.

    `body` is None where the body was refused before its fields were read.
    """
    message = str(error)
    if isinstance(body, ChatFields) and message.startswith(("the prompt", "there is no prompt")):
        return FieldRefused("messages", message)
    if isinstance(body, ChatFields) and message.startswith("lark") and body.structured_outputs is None:
        return FieldRefused("tools", f"the grammar of the tools' calls cannot be used: {message}")
    structured = body is not None and body.structured_outputs is not None
    form = "structured_outputs" if structured else "response_format"
    if message.startswith("preamble"):  # the front wrote it, not the client
        return FieldRefused(form, f"the reasoning before the format cannot be constrained: {message}")
    return FieldRefused(form, message) if structured and param_of(message) == "response_format" else error


def _shown_ids(plan: ChatPlan | None, target: TargetModel) -> frozenset[int]:
    """Ids of special tokens that the parser of the answer looks for."""
    tokens = target.tokens
    if plan is None or tokens is None:
        return frozenset()
    if plan.order and target.chat is not None:
        return frozenset(parsed_marks(target).values())
    if plan.preamble:
        return frozenset(special_marks(target).values())
    marks = set() if plan.thought is Thought.NONE else set(plan.marks)
    if (format_ := format_named(plan.format)) is not None:
        marks |= {format_.begin, format_.end}
    return frozenset(id_ for id_ in tokens.special_ids if tokens.token(id_) in marks)


def _start(body: GenerationFields, seed: int, tenant: str, session: str) -> generation_pb2.GenerateStart:
    stops = body.stop
    return generation_pb2.GenerateStart(
        tenant=tenant,
        session=session,
        sampling=_sampling(body),
        max_tokens=_max_tokens(body),
        stop=[stops] if isinstance(stops, str) else stops,
        seed=seed,
        speculation=_speculation(body),
        n=body.n,
        logprobs=_logprobs(body),
        grammar=_grammar(body),
    )


def _max_tokens(body: GenerationFields) -> int | None:
    if isinstance(body, ChatFields) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return 1 if prompt_alone(body) else body.max_tokens


def _sampling(body: GenerationFields) -> common_pb2.Sampling:
    biases = {int(id_): bias for id_, bias in (body.logit_bias or {}).items()}
    if wrong := [id_ for id_ in biases if id_ >= 2**32]:
        raise InvalidRequest(f"logit_bias names id {wrong[0]}, which no vocabulary has")
    return common_pb2.Sampling(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        contrast_strength=body.contrast_strength,
        contrast_plausibility=body.contrast_plausibility,
        logit_bias=biases,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_ids=body.stop_token_ids,
    )


def _speculation(body: GenerationFields) -> generation_pb2.Speculation | None:
    fields = body.speculation
    if fields is None:
        return None
    return generation_pb2.Speculation(
        enabled=fields.enabled,
        sources=fields.sources,
        node_limit=fields.nodes,
        learn=fields.learn,
        corpora=fields.corpora,
        criterion=None if fields.criterion is None else criterion_of(fields.criterion),
        edit=fields.edit or False,
        policy=fields.policy or "",
    )


def _logprobs(body: GenerationFields) -> common_pb2.Logprobs | None:
    if isinstance(body, ChatFields):
        return common_pb2.Logprobs(top_logprobs=body.top_logprobs) if body.logprobs else None
    assert isinstance(body, CompletionFields)
    return None if body.logprobs is None else common_pb2.Logprobs(top_logprobs=body.logprobs)


def _grammar(body: GenerationFields) -> common_pb2.Grammar | None:
    wanted, structured = body.response_format, body.structured_outputs
    if structured is not None:
        if wanted is not None:
            raise FieldRefused("structured_outputs", "structured_outputs is given beside response_format")
        return grammar_to_wire(_structured(structured))
    if isinstance(wanted, JsonObjectFormat):
        return grammar_to_wire(Grammar(GrammarKind.JSON_OBJECT))
    if isinstance(wanted, JsonSchemaFormat):
        return grammar_to_wire(_schema(wanted.json_schema.schema_, "response_format"))
    return None


def _structured(body: StructuredOutputs) -> Grammar:
    given = [name.rstrip("_") for name, value in body if value is not None]
    if len(given) != 1:
        names = " and ".join(given) or "nothing"
        raise FieldRefused(
            "structured_outputs",
            f"structured_outputs has {names}; give one of json, regex, json_object, choice, grammar",
        )
    if body.regex is not None:
        return Grammar(GrammarKind.REGEX, body.regex)
    if body.choice is not None:
        return Grammar.one_of(body.choice)
    if body.grammar is not None:
        return Grammar(GrammarKind.LARK, body.grammar)
    if body.json_ is not None:
        return _schema(body.json_, "structured_outputs")
    return Grammar(GrammarKind.JSON_OBJECT)


def _schema(schema: str | dict[str, Any], field: str) -> Grammar:
    if isinstance(schema, str):
        return Grammar(GrammarKind.JSON_SCHEMA, schema)
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(field, schema))
