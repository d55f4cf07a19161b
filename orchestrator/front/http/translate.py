"""A body's fields into the message that a client over gRPC would have sent, so that one set of checks serves
both fronts. Pure."""

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.front.admission import Admitted, Target, admit, session_key
from orchestrator.front.http.errors import FieldRefused, param_of
from orchestrator.front.http.fields import (
    ChatRequest,
    CompletionRequest,
    Generation,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import grammar_to_wire
from speculative.errors import InvalidRequest
from speculative.grammar import Grammar, GrammarKind

Prompt = str | list[int]


def prompts_of(asked: CompletionRequest) -> list[Prompt]:
    """One or several, each a text or ids. Raises FieldRefused where there is none."""
    prompt = asked.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise FieldRefused("prompt", "prompt is an empty list; give a text, or ids")
    texts = [part for part in prompt if isinstance(part, str)]
    lists = [part for part in prompt if isinstance(part, list)]
    ids = [part for part in prompt if isinstance(part, int)]
    return [ids] if ids else [*texts, *lists]


def check_together(asked: Generation) -> None:
    """Raises FieldRefused where fields mean nothing without one another."""
    if asked.stream_options is not None and not asked.stream:
        raise FieldRefused("stream_options", "stream_options is given without stream: true")
    told = asked.per_request_spec_decode_metrics not in (None, "none")
    if asked.stream and told and not wants_usage(asked):
        raise FieldRefused(
            "per_request_spec_decode_metrics",
            "per_request_spec_decode_metrics is told with the usage; give stream_options.include_usage: true",
        )
    if isinstance(asked, ChatRequest):
        if asked.top_logprobs is not None and not asked.logprobs:
            raise FieldRefused("top_logprobs", "top_logprobs is given without logprobs: true")
        if None not in (asked.max_tokens, asked.max_completion_tokens):
            raise FieldRefused("max_tokens", "max_tokens is given beside max_completion_tokens; give one")


def wants_usage(asked: Generation) -> bool:
    """Whether a stream ends with it."""
    return bool(asked.stream_options and asked.stream_options.include_usage)


def admitted(
    asked: Generation,
    prompts: Sequence[Sequence[int]],
    target: Target,
    seed: int,
    tenant: str,
    name: str,
    default: int,
    prediction: Sequence[int] = (),
) -> list[Admitted]:
    """The requests that answer it, one for each prompt, checked. Raises InvalidRequest.

    `name` begins their sessions' names; `default` is max_tokens where it is left out; `prediction` is what
    was asked with, tokenized.
    """
    found = []
    for place, ids in enumerate(prompts):
        start = _start(asked, seed, tenant, f"{name}-{place}")
        found.append(admit(start, session_key(start), ids, target, default, prediction))
    return found


def blamed(error: InvalidRequest, asked: Generation) -> InvalidRequest:
    """The refusal under the name that the body has for what it is about, where that has two names."""
    if asked.structured_outputs is None or param_of(str(error)) != "response_format":
        return error
    return FieldRefused("structured_outputs", str(error))


def _start(asked: Generation, seed: int, tenant: str, session: str) -> generation_pb2.GenerateStart:
    stops = asked.stop
    return generation_pb2.GenerateStart(
        tenant=tenant,
        session=session,
        sampling=_sampling(asked),
        max_tokens=_max_tokens(asked),
        stop=[stops] if isinstance(stops, str) else stops,
        seed=seed,
        speculation=_speculation(asked),
        n=asked.n,
        logprobs=_logprobs(asked),
        grammar=_grammar(asked),
    )


def _max_tokens(asked: Generation) -> int | None:
    if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
        return asked.max_completion_tokens
    return asked.max_tokens


def _sampling(asked: Generation) -> common_pb2.Sampling:
    biases = {int(id_): bias for id_, bias in (asked.logit_bias or {}).items()}
    if wrong := [id_ for id_ in biases if id_ >= 2**32]:
        raise InvalidRequest(f"logit_bias names id {wrong[0]}, which no vocabulary has")
    return common_pb2.Sampling(
        temperature=asked.temperature,
        top_k=None if asked.top_k is None else max(0, asked.top_k),
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=biases,
        min_tokens=asked.min_tokens,
        ignore_eos=asked.ignore_eos,
        stop_ids=asked.stop_token_ids,
    )


def _speculation(asked: Generation) -> generation_pb2.Speculation | None:
    told = asked.speculation
    if told is None:
        return None
    return generation_pb2.Speculation(
        enabled=told.enabled,
        sources=told.sources,
        node_limit=told.nodes,
        learn=told.learn,
        corpora=told.corpora,
    )


def _logprobs(asked: Generation) -> common_pb2.Logprobs | None:
    if isinstance(asked, ChatRequest):
        return common_pb2.Logprobs(top_logprobs=asked.top_logprobs) if asked.logprobs else None
    assert isinstance(asked, CompletionRequest)
    return None if asked.logprobs is None else common_pb2.Logprobs(top_logprobs=asked.logprobs)


def _grammar(asked: Generation) -> common_pb2.Grammar | None:
    wanted, structured = asked.response_format, asked.structured_outputs
    if structured is not None:
        if wanted is not None:
            raise FieldRefused("structured_outputs", "structured_outputs is given beside response_format")
        return grammar_to_wire(_structured(structured))
    if isinstance(wanted, JsonObjectFormat):
        return grammar_to_wire(Grammar(GrammarKind.JSON_OBJECT))
    if isinstance(wanted, JsonSchemaFormat):
        return grammar_to_wire(_schema(wanted.json_schema.schema_, "response_format"))
    return None


def _structured(asked: StructuredOutputs) -> Grammar:
    given = [name.rstrip("_") for name, value in asked if value is not None]
    if len(given) != 1:
        names = " and ".join(given) or "nothing"
        raise FieldRefused(
            "structured_outputs", f"structured_outputs has {names}; give one of json, regex, json_object"
        )
    if asked.regex is not None:
        return Grammar(GrammarKind.REGEX, asked.regex)
    if asked.json_ is not None:
        return _schema(asked.json_, "structured_outputs")
    return Grammar(GrammarKind.JSON_OBJECT)


def _schema(schema: str | dict[str, Any], field: str) -> Grammar:
    if isinstance(schema, str):
        return Grammar(GrammarKind.JSON_SCHEMA, schema)
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    except RecursionError as error:
        raise FieldRefused(field, "the schema is nested too deeply") from error
