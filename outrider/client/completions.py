"""What a client receives: responses into chunks and a completion, and models.

Pure; shared by the blocking and the asyncio client, which only move the messages.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import finish_from_wire
from outrider.wire.criteria import promise_from_wire
from outrider.wire.names import TARGET
from speculative.acceptance.criterion import Promise
from speculative.errors import OutriderError, Unavailable
from speculative.stop import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """A generated token's log-probability under the target, a natural logarithm."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest token ids at this position with their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one choice that were committed since that choice's last chunk."""

    ids: tuple[int, ...]
    text: str
    """Text that these tokens complete; unfinished characters and stop strings wait for a later chunk."""
    sources: tuple[str, ...]
    """Per token: the name of the source that drafted it, or "target" where the target chose it alone."""
    choice: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """Per token, where the request asked for log-probabilities."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Counts of the drafts that a client's device sent for a choice, up to the verifier."""

    windows: int
    """Messages with drafts that the orchestrator received."""
    nodes: int
    """Drafted tokens in these messages."""
    forwarded: int
    """Drafted tokens that the orchestrator sent on to the verifier."""
    dropped: Mapping[str, int]
    """Drafted tokens that the orchestrator dropped, by reason; see docs/metrics.md."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, and what speculation saved. After a move to another orchestrator, counted anew."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    """Target passes that committed at least one token."""
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    recoveries: int = 0
    """How often the request moved to another verifier because it had lost its own."""
    replay_identical: bool = False
    """Whether every verifier with the same numerics generates these tokens; see docs/exactness.md."""
    promise: Promise = Promise.SAME_IDS
    """What was promised of the output beside plain decoding; another than SAME_IDS where the request named a
    criterion."""
    cached_tokens: int = 0
    """Prompt tokens that the verifier had cached; of several choices, those of the first."""
    device: DeviceShare | None = None
    """What the client's device contributed, of several choices to the first; None without a device. Tokens
    that the device drafted and the target accepted are in `accepted_by_source`, under `edge`."""

    @property
    def acceptance_length(self) -> float:
        """Completion tokens per round; 1 is plain decoding."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a request."""

    ids: tuple[int, ...]
    """Generated token ids, an end-of-sequence id included."""
    text: str
    finish_reason: FinishReason
    seed: int
    """A request with n = 1 and this seed generates the same tokens."""
    usage: Usage
    sources: tuple[str, ...]
    """Per token, as in Chunk."""
    logprobs: tuple[Logprob, ...] = ()
    """Per token, where the request asked for log-probabilities."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. With n above 1 its fields are those of the first choice; all are in `choices`."""

    ids: tuple[int, ...]
    """Generated token ids, an end-of-sequence id included."""
    text: str
    finish_reason: FinishReason
    seed: int
    session: str
    usage: Usage
    """Of all choices together; prompt tokens are counted once."""
    sources: tuple[str, ...]
    """Per token, as in Chunk."""
    logprobs: tuple[Logprob, ...] = ()
    """Per token, where the request asked for log-probabilities."""
    choices: tuple[Choice, ...] = ()
    """All answers, the first of which is repeated in the fields above."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target model that an orchestrator serves."""

    name: str
    max_length: int
    """The most tokens in prompt and answer together."""
    vocabulary_size: int
    has_tokenizer: bool
    """Whether text prompts and stop strings are possible."""
    sources: tuple[str, ...]
    """Names of the sources that draft for this model."""


def model_from_wire(model: generation_pb2.Model) -> Model:
    """The model that an orchestrator's message describes."""
    return Model(
        name=model.name,
        max_length=model.max_length,
        vocabulary_size=model.vocabulary_size,
        has_tokenizer=model.has_tokenizer,
        sources=tuple(model.sources),
    )


class CompletionBuilder:
    """Builds a completion from a stream of responses: `add` each one, then take `completion`."""

    def __init__(self, choices: int = 1) -> None:
        self.session = ""
        self.seed = 0
        self.epoch = 0
        """The highest epoch received; 0 before the answer has started."""
        self._names: tuple[str, ...] = (TARGET,)
        self._prompt_length = 0
        self._asked = choices
        self._choices: defaultdict[int, _Folded] = defaultdict(_Folded)

    def add(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """The chunk in this response; None where it holds no tokens or text.

        Raises OutriderError where the request has failed, Unavailable where tokens do not join those before:
        another orchestrator may continue from those.
        """
        match response.WhichOneof("body"):
            case "started":
                self.session, self.seed = response.started.session, response.started.seed
                self.epoch = max(self.epoch, response.started.epoch)
                self._names = (TARGET, *response.started.source_names)
                self._prompt_length = response.started.prompt_tokens
            case "tokens":
                return self._tokens(response.tokens)
            case "finished":
                finished = response.finished
                if self._choices[finished.choice].finished is not None:
                    return None  # sent before the stream was lost, and again after
                self._choices[finished.choice].finished = finished
                if finished.reason == common_pb2.FINISH_REASON_ERROR:
                    raise OutriderError(finished.message or "the request failed without a word")
                if finished.text:
                    return self._chunk(Chunk((), finished.text, (), finished.choice))
        return None

    def have(self) -> list[tuple[int, ...]]:
        """Token ids received so far, by choice."""
        return [self._choices[choice].ids() for choice in range(self._asked)]

    def ended(self) -> list[int]:
        """Numbers of the choices that have finished."""
        begun = self._choices.items()  # and not all that were asked for, which may be any number
        return sorted(choice for choice, it in begun if choice < self._asked and it.finished is not None)

    @property
    def whole(self) -> bool:
        """Whether every choice has finished."""
        return len(self.ended()) == self._asked

    def completion(self) -> Completion:
        """The whole answer. Raises OutriderError where the stream ended before the answer did."""
        choices = tuple(self._choices[choice].choice() for choice in range(self._asked))
        first = choices[0]
        return Completion(
            ids=first.ids,
            text=first.text,
            finish_reason=first.finish_reason,
            seed=self.seed,
            session=self.session,
            usage=_total([choice.usage for choice in choices]),
            sources=first.sources,
            logprobs=first.logprobs,
            choices=choices,
        )

    def _tokens(self, tokens: generation_pb2.GeneratedTokens) -> Chunk | None:
        if self._choices[tokens.choice].finished is not None:
            return None  # an end stands, whatever another orchestrator continues with
        due = self._prompt_length + self._choices[tokens.choice].length
        if tokens.position != due:
            raise Unavailable(
                f"choice {tokens.choice}: ids came for position {tokens.position}, but {due} is next"
            )
        self.epoch = max(self.epoch, tokens.epoch)
        sources = tuple(self._names[source_index] for source_index in tokens.token_sources)
        ids = tuple(tokens.ids)
        logprobs = tuple(_logprob(id_, sent) for id_, sent in zip(ids, tokens.logprobs, strict=False))
        return self._chunk(Chunk(ids, tokens.text, sources, tokens.choice, logprobs))

    def _chunk(self, chunk: Chunk) -> Chunk:
        self._choices[chunk.choice].add(chunk)
        return chunk


class _Folded:
    """The chunks of one choice so far."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.length = 0
        self.finished: generation_pb2.GenerateFinished | None = None

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.length += len(chunk.ids)

    def ids(self) -> tuple[int, ...]:
        return tuple(id_ for chunk in self.chunks for id_ in chunk.ids)

    def choice(self) -> Choice:
        ids = self.ids()
        finished = self.finished
        if finished is None:
            raise OutriderError(f"the answer broke off after {len(ids)} tokens")
        return Choice(
            ids=ids,
            text="".join(chunk.text for chunk in self.chunks),
            finish_reason=finish_from_wire(finished.reason) or FinishReason.ERROR,
            seed=finished.seed,
            usage=_usage(finished),
            sources=tuple(source for chunk in self.chunks for source in chunk.sources),
            logprobs=tuple(logprob for chunk in self.chunks for logprob in chunk.logprobs),
        )


def _logprob(id_: int, sent: common_pb2.TokenLogprob) -> Logprob:
    return Logprob(id_, sent.logprob, tuple(zip(sent.top_ids, sent.top_logprobs, strict=True)))


def _usage(finished: generation_pb2.GenerateFinished) -> Usage:
    usage = finished.usage
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        rounds=usage.rounds,
        accepted_by_source=dict(usage.accepted_by_source),
        recoveries=usage.recoveries,
        replay_identical=usage.replay_identical,
        promise=promise_from_wire(usage.promise),
        cached_tokens=usage.cached_tokens,
        device=_device(finished.device) if finished.HasField("device") else None,
    )


def _device(sent: generation_pb2.DeviceUsage) -> DeviceShare:
    return DeviceShare(sent.windows, sent.nodes, sent.forwarded, dict(sent.dropped))


def _total(usages: Sequence[Usage]) -> Usage:
    """The sum over all choices, which share one prompt."""
    accepted: dict[str, int] = {}
    for usage in usages:
        for source, count in usage.accepted_by_source.items():
            accepted[source] = accepted.get(source, 0) + count
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        rounds=sum(usage.rounds for usage in usages),
        accepted_by_source=accepted,
        recoveries=sum(usage.recoveries for usage in usages),
        replay_identical=all(usage.replay_identical for usage in usages),
        promise=usages[0].promise,
        cached_tokens=usages[0].cached_tokens,
        device=usages[0].device,
    )
