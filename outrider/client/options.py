"""What a client requests: options into a request's message.

Pure; shared by the blocking and the asyncio client, which only move the messages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from outrider.client.option_checks import check_options
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import WHOLE_ANSWER_INTERVAL_MS, grammar_to_wire, logprobs_to_wire
from outrider.wire.criteria import criterion_of
from speculative.errors import InvalidRequest
from speculative.grammar import Grammar, GrammarKind
from speculative.logprobs import Logprobs, LogprobsOf


class Options(TypedDict, total=False):
    """Arguments of `generate` and `stream` beside the prompt. Left out or None: the contract's default."""

    ids: Sequence[int] | None
    """The prompt as token ids in place of text; nothing is added to them."""
    max_tokens: int | None
    """The most tokens to generate; default 128, or as many as the context has room for."""
    temperature: float | None
    """0 is greedy; default 1."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    contrast_strength: float | None
    """Weight of the verifier's amateur against the target (docs/contrast.md); default 0, no contrast."""
    contrast_plausibility: float | None
    """With `contrast_strength`: ids below this share of the target's highest probability are dropped; default
    0.1."""
    stop: Sequence[str] | str
    """Strings that end the request."""
    stop_ids: Sequence[int] | None
    """Token ids that end the request beside the target's end-of-sequence ids."""
    ignore_eos: bool
    """Whether to continue past end-of-sequence ids."""
    min_tokens: int | None
    """Tokens to generate before a stop string, a stop id or an end-of-sequence id may end the request."""
    json_schema: Mapping[str, Any] | str | None
    """The answer is JSON that matches this schema. At most one of this, `regex`, `json_object`, `choice` and
    `lark`."""
    regex: str | None
    """The whole answer matches this regular expression."""
    json_object: bool
    """Whether the answer must be a JSON object."""
    choice: Sequence[str] | str | None
    """Texts of which the whole answer must be one."""
    lark: str | None
    """Grammar in Lark's language that the whole answer must follow, from the rule `start` on."""
    n: int | None
    """How many answers to generate; default 1."""
    logprobs: bool
    """Whether each token comes with its log-probability."""
    top_logprobs: int | None
    """With `logprobs`: how many of the likeliest tokens to list at each position, 0 to 20; default 0."""
    logprobs_of: Literal["raw", "processed"] | None
    """With `logprobs`: of the target's own distribution, or of the processed one that is sampled from;
    default raw."""
    seed: int | None
    """Unsigned 64 bits; the same request with the same seed generates the same tokens."""
    model: str
    session: str
    tenant: str
    speculation: bool
    """False: decode without drafts. The tokens are the same."""
    sources: Sequence[str] | str | None
    """Names of the sources to use drafts of; default all, or the 16 most useful ones of more."""
    nodes: int | None
    """The most drafted tokens that one round verifies."""
    learn: bool | None
    """Whether later drafts for the same tenant may come from this answer; default true."""
    corpora: Sequence[str] | str | None
    """Names of the corpora to draft from; default all that the tenant may use."""
    prediction: str | None
    """Text that the answer may resemble, in whole or in part. Drafts come from it; the answer is the same."""
    criterion: Mapping[str, Mapping[str, float]] | None
    """How drafted tokens are accepted: {name: {parameter: value}}; default: by the target's own choice alone.
    docs/criteria.md says what each criterion gives up."""
    references: Sequence[str] | str | None
    """Texts that the answer may copy from, at most 16, such as files. Drafts come from them; the answer is
    the same."""
    edit: bool
    """Whether drafts also come from the prompt's last document: its last block between lines of ```, or the
    whole prompt if it has none."""
    policy: str | None
    """How far drafts go: a policy's name, or name:number; default: as each source's settings say."""
    message_interval_ms: int | None
    """Least milliseconds between two messages of the answer, which then hold more tokens each and cost less.
    Default: 0 for `stream`, which is a message a round, and 200 for `generate`. A device that drafts gets a
    message a round."""
    timeout: float | None
    """Seconds for the whole request, above 0, after which Unavailable is raised. Default: no limit."""


def for_whole_answer(options: Options) -> Options:
    """The options, with an interval between messages unless one is given: the caller waits for the end."""
    if options.get("message_interval_ms") is not None:
        return options
    return {**options, "message_interval_ms": WHOLE_ANSWER_INTERVAL_MS}


def build_request(prompt: str | None, options: Options) -> generation_pb2.GenerateRequest:
    """The request's message. Raises InvalidRequest for values that no message can hold.

    The server checks the rest.
    """
    check_options(prompt, options)
    stop, sources = options.get("stop") or (), options.get("sources") or ()
    corpora, ids = options.get("corpora") or (), options.get("ids")
    references = options.get("references") or ()
    try:
        start = generation_pb2.GenerateStart(
            tenant=options.get("tenant", ""),
            session=options.get("session", ""),
            model=options.get("model", ""),
            ids=None if ids is None else generation_pb2.TokenIds(ids=ids),
            sampling=_sampling(options),
            max_tokens=options.get("max_tokens"),
            stop=(stop,) if isinstance(stop, str) else stop,
            seed=options.get("seed"),
            speculation=generation_pb2.Speculation(
                enabled=options.get("speculation", True),
                sources=(sources,) if isinstance(sources, str) else sources,
                node_limit=options.get("nodes"),
                learn=options.get("learn"),
                corpora=(corpora,) if isinstance(corpora, str) else corpora,
                prediction=options.get("prediction") or "",
                criterion=None if (named := options.get("criterion")) is None else criterion_of(named),
                references=(references,) if isinstance(references, str) else references,
                edit=options.get("edit") or False,
                policy=options.get("policy") or "",
            ),
            n=options.get("n"),
            logprobs=_logprobs(options),
            grammar=_grammar(options),
            message_interval_ms=options.get("message_interval_ms") or 0,
        )
        if prompt is not None:
            start.text = prompt
        return generation_pb2.GenerateRequest(start=start)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"not a request: {error}") from error


def _logprobs(options: Options) -> common_pb2.Logprobs | None:
    top, of = options.get("top_logprobs"), options.get("logprobs_of")
    if not options.get("logprobs"):
        for name, value in (("top_logprobs", top), ("logprobs_of", of)):
            if value is not None:
                raise InvalidRequest(f"{name} is {value!r}, but logprobs were not asked for")
        return None
    if of is not None and of not in set(LogprobsOf):
        raise InvalidRequest(f"logprobs_of is {of!r}; {' and '.join(LogprobsOf)} are possible")
    return logprobs_to_wire(Logprobs(top or 0, LogprobsOf(of or LogprobsOf.RAW)))


def _grammar(options: Options) -> common_pb2.Grammar | None:
    given: dict[GrammarKind, Any] = {
        kind: value for kind in GrammarKind if (value := options.get(kind)) not in (None, False)
    }
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are given; the text can be one of them")
    ((kind, value),) = given.items()
    match kind:
        case GrammarKind.JSON_OBJECT:
            grammar = Grammar(kind)
        case GrammarKind.CHOICE:
            grammar = Grammar.one_of((value,) if isinstance(value, str) else list(value))
        case GrammarKind.JSON_SCHEMA if not isinstance(value, str):
            grammar = Grammar(kind, json.dumps(value))
        case _:
            grammar = Grammar(kind, value)
    return grammar_to_wire(grammar)


def _sampling(options: Options) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=options.get("temperature"),
        top_k=options.get("top_k"),
        top_p=options.get("top_p"),
        min_p=options.get("min_p"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        logit_bias=options.get("logit_bias") or {},
        min_tokens=options.get("min_tokens"),
        ignore_eos=options.get("ignore_eos") or None,
        stop_ids=options.get("stop_ids") or (),
        contrast_strength=options.get("contrast_strength"),
        contrast_plausibility=options.get("contrast_plausibility"),
    )
