"""`Rag` runs the loops with a server and a retriever. Moves messages, decides nothing."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outrider.client import Client
from outrider.rag.loops import (
    Found,
    Loop,
    RagCounts,
    RagLimits,
    RagPiece,
    RagText,
    Search,
    WantPiece,
    plain_loop,
    speculative_loop,
)
from outrider.rag.passages import FoundPassages, RagPassage, Retriever
from speculative.errors import InvalidRequest, OutriderError, Unavailable
from speculative.noise import derive
from speculative.params import SEED_BITS
from speculative.stop import FinishReason

PER_PIECE = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias"),
        *("contrast_strength", "contrast_plausibility"),
        *("stop_ids", "ignore_eos", "model", "tenant", "speculation", "sources", "nodes", "learn"),
        *("corpora", "policy", "references"),
    }
)
"""Options that mean the same for every piece of an answer as for a whole one."""
_LONGEST_S = 600.0
"""Seconds that a request for one piece may take where the caller sets no timeout."""


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """A whole answer."""

    ids: tuple[int, ...]
    """Generated ids, an end-of-sequence id included."""
    text: str
    finish_reason: FinishReason
    seed: int
    passages: tuple[RagPassage | None, ...]
    """The passage under which each piece was generated."""
    counts: RagCounts
    """What the answer took."""


class Rag:
    """Generates with a passage before the prompt, which is looked up anew every few tokens.

    Args:
        client: of the server that generates.
        retriever: finds passages, in the caller's thread.
        tokenizer: the target's.
        limits: how text and searches take turns.
        template: the text that goes before the prompt for a passage.
    """

    def __init__(
        self,
        client: Client,
        retriever: Retriever,
        tokenizer: Tokenizer,
        limits: RagLimits | None = None,
        *,
        template: Callable[[RagPassage], str] = lambda passage: f"{passage.text}\n",
    ) -> None:
        self._client = client
        self._retriever = retriever
        self._tokenizer = tokenizer
        self._limits = limits or RagLimits()
        self._template = template

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        seed: int | None = None,
        timeout: float | None = None,
        speculative: bool = True,
        **options: Any,
    ) -> RagAnswer:
        """The whole answer to a prompt.

        Args:
            prompt: text behind the passage.
            max_tokens: the most tokens to generate, at least 1.
            seed: unsigned 64 bits; drawn if None.
            timeout: seconds for the whole answer.
            speculative: False waits for each search. The answer is the same.
            options: of `Client.generate`, those in `PER_PIECE`.

        Raises OutriderError, and whatever the retriever raises.
        """
        _check(prompt, max_tokens, seed, timeout, options)
        seed = secrets.randbits(SEED_BITS) if seed is None else seed
        text = RagText(self._ids(prompt, special=False), max_tokens, self._limits, self._tokenizer.decode)
        found = FoundPassages(self._retriever, self._limits.kept)
        loop = speculative_loop(text, found, self._limits.stride()) if speculative else plain_loop(text)
        ends_s = None if timeout is None else time.monotonic() + timeout
        self._run(loop, seed, ends_s, options)
        assert text.reason is not None, "a loop ends with its text"
        return RagAnswer(
            tuple(text.ids),
            self._tokenizer.decode(text.ids),
            text.reason,
            seed,
            tuple(text.passages),
            text.counts,
        )

    def _run(self, loop: Loop, seed: int, ends_s: float | None, options: Mapping[str, Any]) -> None:
        reply: Found | RagPiece | None = None
        while True:
            try:
                wanted = loop.send(reply)
            except StopIteration:
                return
            began = time.perf_counter()
            if isinstance(wanted, Search):
                found = self._retriever.search(wanted.queries, wanted.most)
                if len(found) != len(wanted.queries):
                    raise OutriderError(
                        f"the retriever returned {len(found)} lists for {len(wanted.queries)} queries"
                    )
                reply = Found(found, time.perf_counter() - began)
            else:
                ids, reason = self._piece(wanted, seed, _left(ends_s), options)
                reply = RagPiece(ids, reason, time.perf_counter() - began)

    def _piece(
        self, wanted: WantPiece, seed: int, timeout: float, options: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], FinishReason]:
        ids = (*self._before(wanted.passage), *wanted.ids)
        # Noise goes by position, and a shorter passage would bring a position, and its noise, twice.
        piece_seed = derive(seed, wanted.generated)
        asked: Any = {**options, "max_tokens": wanted.tokens, "timeout": timeout}
        done = self._client.generate(ids=ids, seed=piece_seed, **asked)
        return done.ids, done.finish_reason

    def _before(self, passage: RagPassage | None) -> tuple[int, ...]:
        """Ids before those of the prompt: what begins any text, and the passage."""
        text = "" if passage is None else self._template(passage)
        return self._ids(text, special=True)[: self._limits.passage_tokens]

    def _ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)


def _check(prompt: object, tokens: object, seed: object, timeout: object, options: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest(f"prompt is {prompt!r}; it must be a text that is not empty")
    if type(tokens) is not int or tokens < 1:
        raise InvalidRequest(f"max_tokens is {tokens!r}; it must be a whole number of at least 1")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
        raise InvalidRequest(f"seed is {seed!r}; it must be a whole number from 0 to {2**64 - 1}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InvalidRequest(f"timeout is {timeout!r}; it must be a number above 0")
    if wrong := sorted(set(options) - PER_PIECE):
        raise InvalidRequest(
            f"{wrong[0]} cannot be used here, since an answer is generated in pieces; "
            f"these can: {', '.join(sorted(PER_PIECE))}"
        )


def _left(ends_s: float | None) -> float:
    if ends_s is None:
        return _LONGEST_S
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise Unavailable("the answer's timeout has passed")
    return left_s
