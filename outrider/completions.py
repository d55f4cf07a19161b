"""What a client asks and what it gets: options into a request, responses into chunks and a completion.

Pure; shared by the blocking and the asyncio client, which only move the messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast

from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import finish_from_wire
from speculative.commit import FinishReason
from speculative.errors import InvalidRequest, OutriderError

TARGET = "target"
"""Where a token comes from that no source drafted."""


class Options(TypedDict, total=False):
    """What `generate` and `stream` take beside a prompt. Left out or None: the default of the contract."""

    ids: Sequence[int] | None
    """The prompt as token ids, taken as they are; in place of text."""
    max_tokens: int | None
    """The most ids to generate; default 128, or what the context leaves."""
    temperature: float | None
    """0 is greedy; default 1."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: Sequence[str] | str
    """Strings that end the request."""
    seed: int | None
    """Unsigned 64 bits; the same request with the same seed gives the same ids."""
    model: str
    session: str
    tenant: str
    speculation: bool
    """False: decode plainly. The ids are the same."""
    sources: Sequence[str] | None
    """Names of the sources to draft from; default all."""
    nodes: int | None
    """The most drafted nodes in one round."""
    timeout: float | None
    """Seconds for the whole request; then Unavailable is raised."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What was committed since the last one."""

    ids: tuple[int, ...]
    text: str
    """What these ids complete; incomplete characters and possible stop strings are held back."""
    sources: tuple[str, ...]
    """Per id: who drafted it; "target" for the target's own."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost and what speculation gave it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    """Target passes that committed at least one token."""
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Completion tokens per round; 1 is plain decoding."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    ids: tuple[int, ...]
    """Generated ids, an end-of-sequence id included."""
    text: str
    finish_reason: FinishReason
    seed: int
    session: str
    usage: Usage
    sources: tuple[str, ...]
    """Per id, as in Chunk."""


def build_request(prompt: str | None, options: Options) -> generation_pb2.GenerateRequest:
    """The request's message. Raises InvalidRequest for what no message can hold; the rest is the server's."""
    ids = options.get("ids")
    if (prompt is None) == (ids is None):
        raise InvalidRequest("give either a prompt or ids")
    _check_widths(options)
    stop = options.get("stop", ())
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
                sources=options.get("sources") or (),
                node_limit=options.get("nodes"),
            ),
        )
        if prompt is not None:
            start.text = prompt
        return generation_pb2.GenerateRequest(start=start)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"not a request: {error}") from error


_WIDTHS = {"seed": (0, 2**64), "max_tokens": (-(2**63), 2**63), "top_k": (-(2**63), 2**63)}
_WIDTHS["nodes"] = _WIDTHS["top_k"]


def _check_widths(options: Options) -> None:
    """The message's own errors about a number do not say which field it was for."""
    for name, (low, high) in _WIDTHS.items():
        value = options.get(name)
        if isinstance(value, int) and not low <= value < high:
            raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high - 1}")
    for name in ("ids", "logit_bias"):
        for id_ in cast(Iterable[int], options.get(name) or ()):
            if isinstance(id_, int) and not 0 <= id_ < 2**32:
                raise InvalidRequest(f"{name} has {id_}; no vocabulary has such an id")


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
    )


class Folding:
    """One answer as it arrives: `add` every response; `completion` once it has ended."""

    def __init__(self) -> None:
        self.session = ""
        self.seed = 0
        self._names: tuple[str, ...] = (TARGET,)
        self._ids: list[int] = []
        self._sources: list[str] = []
        self._text: list[str] = []
        self._finished: generation_pb2.GenerateFinished | None = None

    def add(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """The chunk in this response, if there is one. Raises OutriderError where the request has failed."""
        match response.WhichOneof("body"):
            case "started":
                self.session, self.seed = response.started.session, response.started.seed
                self._names = (TARGET, *response.started.source_names)
            case "tokens":
                tokens = response.tokens
                sources = tuple(self._names[credit] for credit in tokens.credits)
                return self._chunk(tuple(tokens.ids), tokens.text, sources)
            case "finished":
                self._finished = response.finished
                if response.finished.reason == common_pb2.FINISH_REASON_ERROR:
                    raise OutriderError(response.finished.message or "the request failed without a word")
                if response.finished.text:
                    return self._chunk((), response.finished.text, ())
        return None

    def completion(self) -> Completion:
        """The whole. Raises OutriderError where the stream ended before the answer did."""
        if self._finished is None:
            raise OutriderError(f"the answer broke off after {len(self._ids)} tokens")
        usage = self._finished.usage
        return Completion(
            ids=tuple(self._ids),
            text="".join(self._text),
            finish_reason=finish_from_wire(self._finished.reason) or FinishReason.ERROR,
            seed=self.seed,
            session=self.session,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                rounds=usage.rounds,
                accepted_by_source=dict(usage.accepted_by_source),
            ),
            sources=tuple(self._sources),
        )

    def _chunk(self, ids: tuple[int, ...], text: str, sources: tuple[str, ...]) -> Chunk:
        self._ids += ids
        self._sources += sources
        self._text.append(text)
        return Chunk(ids, text, sources)
