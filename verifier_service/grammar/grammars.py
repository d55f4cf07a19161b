"""The event loop's side of grammars: vets what clients send, and has matchers made, both in threads.

Verdicts are kept by grammar, good and bad ones, the least recently used dropped first; they are a function of
the grammar alone. Knows nothing of sessions or gRPC.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, Overloaded
from speculative.grammar import Grammar, Matcher
from verifier_service.grammar.library import Library, written
from verifier_service.grammar.trial import STACK_MIB
from verifier_service.grammar.vetting import Vetting

_MOST_KNOWN = 256
_MOST_WAITING = 16
"""New grammars on trial, each of which waits for those before it."""
_MOST_BUILDING = 256
"""Sessions whose matchers are being made, of grammars that are known to be harmless."""
_RETRY_AFTER_S = 1.0


class Grammars:
    """What the requests of one target may ask for. To be closed.

    Args:
        tokens: of the target; None where it has no tokenizer.
        end_ids: its end-of-sequence ids.
        vocabulary_size: width of its logits.
    """

    def __init__(self, tokens: TokenTable | None, end_ids: Sequence[int], vocabulary_size: int) -> None:
        self._library: Library | None = None
        self._lacks = "no tokenizer" if tokens is None else "no end-of-sequence id"
        if tokens is not None and end_ids:
            self._library = Library(tokens, end_ids, vocabulary_size)
        self._vetting = Vetting()
        self._vetter = ThreadPoolExecutor(1, "grammar-vetting")
        self._builder = _with_deep_stack("grammar")
        self._verdicts: OrderedDict[Grammar, asyncio.Future[str]] = OrderedDict()
        self._in_trial = 0
        self._building = 0

    async def matcher(self, grammar: Grammar, generated: Sequence[int]) -> Matcher:
        """A session's matcher, after the ids that it has generated already.

        Raises InvalidRequest where the target, or anybody, cannot follow the grammar, or these ids do not;
        Overloaded where too many wait.
        """
        if self._library is None:
            raise InvalidRequest(f"{grammar.kind} is not possible: the target has {self._lacks}")
        fault = await asyncio.shield(self._verdict(grammar))
        if fault:
            raise InvalidRequest(f"{grammar.kind} cannot be used: {fault}")
        if self._building >= _MOST_BUILDING:
            raise Overloaded(f"{self._building} sessions wait for their grammars", _RETRY_AFTER_S)
        self._building += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._builder, self._library.matcher, grammar, tuple(generated))
        finally:
            self._building -= 1

    def close(self) -> None:
        """Ends what runs, as far as it can be ended."""
        self._vetter.shutdown(wait=False, cancel_futures=True)
        self._vetting.close()
        self._builder.shutdown(wait=False, cancel_futures=True)

    def _verdict(self, grammar: Grammar) -> asyncio.Future[str]:
        known = self._verdicts.get(grammar)
        if known is not None:
            self._verdicts.move_to_end(grammar)
            return known
        text = written(grammar)
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
        # Whoever still waits hears of a failure too; it says nothing about the grammar.
        failed = found.cancelled() or found.exception() is not None
        if failed and self._verdicts.get(grammar) is found:
            del self._verdicts[grammar]


def _with_deep_stack(name: str) -> ThreadPoolExecutor:
    """One thread, with more room than the trial's: what fits there fits here."""
    before = threading.stack_size(4 * STACK_MIB * 1024 * 1024)
    try:
        executor = ThreadPoolExecutor(1, name)
        executor.submit(int).result()
        return executor
    finally:
        threading.stack_size(before)
