"""The event loop's side of grammars: vets the grammars of clients and builds matchers, both in threads.

A verdict, good or bad, is a function of the grammar alone. Verdicts are kept, and the least recently used one
is dropped first. Knows nothing of sessions or gRPC.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, Overloaded, Unavailable
from speculative.grammar import Grammar, Matcher
from verifier_service.grammar.library import MatcherFactory, for_trial, written
from verifier_service.grammar.trial import STACK_MIB
from verifier_service.grammar.vetting import Vetting

_MOST_KNOWN = 256
"""Verdicts that are kept."""
_MOST_WAITING = 16
"""New grammars that may be on trial or wait for it; they are tried one after another."""
_MOST_BUILDING = 256
"""Sessions that may wait for their matcher, once their grammar is known to be harmless."""
_RETRY_AFTER_S = 1.0


class Grammars:
    """The grammars that requests of one target ask for. Has to be closed.

    Args:
        tokens: of the target's tokenizer; None for a target without one.
        end_ids: the target's end-of-sequence ids.
        vocabulary_size: width of the target's logits.
    """

    def __init__(self, tokens: TokenTable | None, end_ids: Sequence[int], vocabulary_size: int) -> None:
        self._factory: MatcherFactory | None = None
        self._lacks = "no tokenizer" if tokens is None else "no end-of-sequence id"
        if tokens is not None and end_ids:
            self._factory = MatcherFactory(tokens, end_ids, vocabulary_size)
        self._vetting = Vetting()
        self._vetter = ThreadPoolExecutor(1, "grammar-vetting")
        self._builder = _with_deep_stack("grammar")
        self._verdicts: OrderedDict[Grammar, asyncio.Future[str]] = OrderedDict()
        self._in_trial = 0
        self._building = 0
        self._closed = False

    async def matcher(self, grammar: Grammar, generated: Sequence[int]) -> Matcher:
        """Builds a session's matcher, and moves the matcher over the tokens that the session has generated.

        Raises InvalidRequest where the target cannot follow the grammar, the grammar is faulty, or the tokens
        break it. Raises Overloaded where too many sessions wait, and Unavailable once `close` was called.
        """
        if self._factory is None:
            raise InvalidRequest(f"{grammar.kind} is not possible: the target has {self._lacks}")
        try:
            return await self._built(self._factory, grammar, generated)
        except (asyncio.CancelledError, Exception) as error:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            # Executors that are shut down cancel waiting work and refuse new work.
            raise Unavailable("this verifier is stopping") from error

    def close(self) -> None:
        """Ends the running trial and drops what waits; a matcher that is being built is finished first."""
        self._closed = True
        self._vetter.shutdown(wait=False, cancel_futures=True)
        self._vetting.close()
        self._builder.shutdown(wait=False, cancel_futures=True)

    async def _built(self, factory: MatcherFactory, grammar: Grammar, generated: Sequence[int]) -> Matcher:
        # Each part is tried by itself: the trial's 64 bytes might all go to the preamble, and the verdict on
        # the text may be cached.
        for name, part in grammar.parts().items():
            if fault := await asyncio.shield(self._verdict(part, name)):
                raise InvalidRequest(f"{name} cannot be used: {fault}")
        if self._building >= _MOST_BUILDING:
            raise Overloaded(f"{self._building} sessions wait for their grammars", _RETRY_AFTER_S)
        self._building += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._builder, factory.matcher, grammar, tuple(generated))
        finally:
            self._building -= 1

    def _verdict(self, grammar: Grammar, name: str) -> asyncio.Future[str]:
        known = self._verdicts.get(grammar)
        if known is not None:
            self._verdicts.move_to_end(grammar)
            return known
        text = for_trial(written(grammar, name))
        if self._in_trial >= _MOST_WAITING:
            raise Overloaded(f"{self._in_trial} grammars wait to be compiled", _RETRY_AFTER_S)
        self._in_trial += 1
        found = asyncio.get_running_loop().run_in_executor(self._vetter, self._vetting.fault, text)
        self._verdicts[grammar] = found
        found.add_done_callback(lambda _: self._tried(grammar, found))
        while len(self._verdicts) > _MOST_KNOWN:
            self._verdicts.popitem(last=False)
        return found

    def _tried(self, grammar: Grammar, found: "asyncio.Future[str]") -> None:
        self._in_trial -= 1
        # Sessions that wait get the failure too, but it says nothing about the grammar: it is not kept.
        failed = found.cancelled() or found.exception() is not None
        if failed and self._verdicts.get(grammar) is found:
            del self._verdicts[grammar]


def _with_deep_stack(name: str) -> ThreadPoolExecutor:
    """One thread with a larger stack than a trial has, so that a grammar that passed its trial fits."""
    before = threading.stack_size(4 * STACK_MIB * 1024 * 1024)
    try:
        executor = ThreadPoolExecutor(1, name)
        executor.submit(int).result()
        return executor
    finally:
        threading.stack_size(before)
