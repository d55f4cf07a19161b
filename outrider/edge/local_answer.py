"""Answers by the device's own model alone, for times when the cloud is away; every answer says so.

Such an answer is not the target's text. So a request gets such an answer only if the app asks for it by a
separate call, and no answer mixes tokens of device and cloud.
"""

import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from outrider.client import Chunk, Completion, Usage
from outrider.client.endpoints import ends_at
from outrider.client.options import Options, build_request
from outrider.edge.backends import DraftModel, TextModel
from outrider.edge.controller import Controller, Decision, Preference
from outrider.edge.device_session import DeviceSession, Terms
from outrider.edge.drafted_request import DraftedRequest
from outrider.edge.drafting import DraftingThread
from outrider.edge.latency_model import Mode
from outrider.wire.codec import sampling_from_wire
from outrider.wire.names import EDGE
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from speculative.params import SEED_BITS, SamplingParams
from speculative.stop import FinishReason, StopChecker, stop_bytes
from speculative.text import TextStream

LOCAL = "local"
"""The provenance of an answer that the device's model wrote without the target."""
TOKENS = 128
"""The most tokens of an answer whose request gives no number."""
RETRY_S = 1.0
"""Seconds until a retry while the model works for another request."""
_ALONE = Decision(Mode.PIPELINED, 1, 1, 0, "the device answers alone")
_PLENTY = 1 << 30


@dataclass(frozen=True, slots=True)
class LocalCompletion(Completion):
    """A whole answer of the device's own model; its tokens are not the target's."""

    provenance: str = LOCAL
    """Always `local`: the text is the device's."""


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What the device is to answer alone."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stops: tuple[bytes, ...]
    ends: float | None = None
    """When the request's time is over, on the monotonic clock; None: never."""

    @classmethod
    def of(cls, prompt: str | None, options: Options) -> Self:
        """A client's request. Raises InvalidRequest for what the device alone does not serve."""
        start = build_request(prompt, options).start
        if start.HasField("logprobs") or start.HasField("grammar"):
            raise InvalidRequest("the device's model alone gives no log-probabilities and follows no grammar")
        if start.n > 1 or start.speculation.HasField("criterion"):
            raise InvalidRequest("the device's model alone gives one answer, by no criterion")
        asked = start.ids.ids if start.WhichOneof("prompt") == "ids" else start.text
        return cls(
            asked if isinstance(asked, str) else tuple(asked),
            sampling_from_wire(start.sampling),
            start.seed if start.HasField("seed") else secrets.randbits(SEED_BITS),
            start.max_tokens if start.HasField("max_tokens") else TOKENS,
            stop_bytes(start.stop),
            ends_at(options),
        )


class LocalAnswer:
    """One answer of a model, token by token: the rule by which the target chooses, over the model's logits.

    Raises:
        InvalidRequest: the model knows no text, or the prompt leaves no room for a token.
        DraftModelFailed: the model cannot be called.
    """

    def __init__(self, model: DraftModel, request: LocalRequest) -> None:
        if not isinstance(model, TextModel):
            raise InvalidRequest(f"{model.name} only drafts: it has no encode and no token_bytes")
        request.params.check_vocabulary(model.vocabulary_size)
        prompt = request.prompt
        self.ids = tuple(model.encode(prompt) if isinstance(prompt, str) else prompt)
        if not 0 < len(self.ids) < model.max_length:
            raise InvalidRequest(
                f"the prompt has {len(self.ids)} tokens; {model.name} takes 1 to {model.max_length - 1}"
            )
        self._model: TextModel = model
        self._request = request
        self._ends = frozenset() if request.params.ignore_eos else model.end_ids
        self._ends |= frozenset(request.params.stop_ids)
        limit = min(len(self.ids) + request.max_tokens, model.max_length)
        self._checker = StopChecker(
            self._ends, limit, request.stops, self._token_bytes, self.ids, len(self.ids), self._min_tokens
        )
        self._text = TextStream(self._token_bytes, request.stops, self._min_tokens)
        self._session = DeviceSession(self._terms(limit, model.vocabulary_size), _ALONE)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer has ended; None while it goes on."""
        return self._checker.finished

    def chunks(self) -> Iterator[Chunk]:
        """The tokens, each with the text that it completes."""
        self._model.rewind(0)
        session = self._session
        while self._checker.finished is None:
            reading = session.plan()
            assert reading is not None, "a session with room for a token has something to draft"
            if reading.keep < len(session.read):
                self._model.rewind(reading.keep)
            session.drafted(reading, self._model.forward(reading.ids))
            window = session.take_window()
            assert window is not None, "a drafted token makes a window of one"
            session.commit(session.length, window.tokens)
            reason = self._checker.push(window.tokens[0])
            text = self._text.push(window.tokens)
            if reason is not None:
                text += self._text.finish(reason)
            yield Chunk(window.tokens, text, (EDGE,))

    @property
    def _min_tokens(self) -> int:
        return self._request.params.min_tokens

    def _terms(self, limit: int, vocabulary_size: int) -> Terms:
        held_back = tuple(sorted(self._ends)) if self._min_tokens else ()
        return Terms(
            ids=self.ids,
            prompt_length=len(self.ids),
            seed=self._request.seed,
            epoch=1,
            params=replace(self._request.params, stop_ids=held_back),
            vocabulary_size=vocabulary_size,
            limit=limit + 1,  # a device leaves the last token to the target; here there is none
            credits=_PLENTY,
            credits_per_token=0,
        )

    def _token_bytes(self, id_: int) -> bytes:
        return b"" if id_ in self._ends else self._model.token_bytes(id_)


class LocalStream(Iterator[Chunk]):
    """An answer of the device's own model as it is generated; iterate to its end, or `close` it.

    Raises:
        Overloaded: the model is in use for another request.
        Unavailable: the model is closed, or the request's time is over.
        OutriderError: the model cannot be opened.
    """

    provenance = LOCAL

    def __init__(self, drafting: DraftingThread, request: LocalRequest) -> None:
        self._drafting = drafting
        self._request = request
        self._owner = DraftedRequest(Controller(Preference.BALANCED, drafting.measurements, enabled=False))
        self._chunks: queue.SimpleQueue[Chunk | OutriderError | None] = queue.SimpleQueue()
        self._taken: list[Chunk] = []
        self._prompt_tokens = 0
        self._reason: FinishReason | None = None
        self._closed = threading.Event()
        drafting.wait_open()
        if not drafting.claim(self._owner):
            raise Overloaded(self._owner.trouble, RETRY_S)
        drafting.lend(self._generate, self._end)

    def __next__(self) -> Chunk:
        ends = self._request.ends
        try:
            arrived = self._chunks.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
        except queue.Empty:
            self.close()
            raise Unavailable("the device's model took longer than the request's timeout") from None
        if isinstance(arrived, Chunk):
            self._taken.append(arrived)
            return arrived
        self._chunks.put(arrived)  # for a caller that asks again
        if arrived is None:
            raise StopIteration
        raise arrived

    def completion(self) -> LocalCompletion:
        """The whole answer; reads the rest of the stream. Raises OutriderError."""
        for _ in self:
            pass
        ids = tuple(id_ for chunk in self._taken for id_ in chunk.ids)
        return LocalCompletion(
            ids=ids,
            text="".join(chunk.text for chunk in self._taken),
            finish_reason=self._reason or FinishReason.CANCELLED,
            seed=self._request.seed,
            session="",
            usage=Usage(prompt_tokens=self._prompt_tokens, completion_tokens=len(ids)),
            sources=(EDGE,) * len(ids),
        )

    def close(self) -> None:
        """Ends the answer behind the token that is being generated."""
        self._closed.set()

    def _generate(self, model: DraftModel) -> None:
        """Generates the answer; runs in the drafting thread."""
        failure: OutriderError | None = None
        try:
            answer = LocalAnswer(model, self._request)
            self._prompt_tokens = len(answer.ids)
            for chunk in answer.chunks():
                if self._closed.is_set() or self._drafting.is_closed:
                    break
                self._chunks.put(chunk)
            self._reason = answer.finish_reason
        except OutriderError as error:
            failure = error
        except Exception as error:  # whatever the model's library raises
            failure = OutriderError(f"{model.name} failed: {type(error).__name__}: {error}")
        self._end(failure)

    def _end(self, failure: OutriderError | None) -> None:
        # A caller that has read the end may ask for the next answer at once.
        self._drafting.release(self._owner)
        self._chunks.put(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
