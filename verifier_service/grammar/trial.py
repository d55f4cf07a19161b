"""Compiles one grammar in a process of its own, within bounds of time and memory, and walks a little into it.

The library cannot be interrupted, some grammars take it minutes or gigabytes, and a grammar that refers to
itself deeply enough overflows the stack, which would end a verifier. So every grammar of a client is tried
here first, with the grammar on standard input and one JSON object on standard output. The script is run by
its path and imports nothing of this repository, so that it starts in a tenth of a second.
"""

import json
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

CPU_S = 1
"""Time of one core that a trial may take, in seconds."""
MEMORY_MIB = 512
"""Address space that a trial may add to that of the process when it begins, in MiB."""
OUT_OF_MEMORY = 3
"""Exit status of a trial whose thread has raised: there was no memory for an object of Python."""
STACK_MIB = 8
"""Stack of the thread that compiles, in MiB. The verifier's own thread has a larger one."""
_LONGEST_TOKEN = 1024
_STEPS = 64
_BYTES = 256
TRIED_ID = 257
"""The special token of the trial's vocabulary, behind the bytes and the id that ends a text."""
_MIB = 1024 * 1024


class Vocabulary:
    """A vocabulary in the form that the library expects.

    Args:
        tokens: bytes of each id; empty for special ids and for unused ones.
        special_ids: ids that stand for no text.
        end_ids: ids that end a text, at least one.
    """

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_ids: list[int]) -> None:
        # The library marks special ids with a first byte of 255, which begins no text in UTF-8, and fails on
        # long tokens. Neither kind can be chosen.
        odd = [token[:1] == b"\xff" or len(token) > _LONGEST_TOKEN for token in tokens]
        self.tokens = [b"" if left_out else token for token, left_out in zip(tokens, odd, strict=True)]
        self.special_token_ids = special_ids
        self.bos_token_id = None
        self.eos_token_id = end_ids[0]
        self._end_ids = end_ids

    def __call__(self, text: object) -> list[int]:
        """Tokenizes nothing: the library asks only where tokens are forced, which our grammars forbid."""
        raise TypeError("this vocabulary tokenizes nothing")

    def tokenizer(self) -> LLTokenizer:
        """The library's tokenizer of this vocabulary."""
        return LLTokenizer(TokenizerWrapper(self), eos_token=self._end_ids)


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar within bounds; the matcher of a faulty or too large grammar is in error."""
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        # Rows of an ambiguous grammar grow with the text, and each byte of each token looks at all items.
        max_items_in_row=1_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def try_out(grammar: str) -> str:
    """The fault of a grammar, in the library's words; empty where none is found."""
    tokens = [bytes([byte]) for byte in range(_BYTES)]
    vocabulary = Vocabulary([*tokens, b"<256>", b"<257>"], [_BYTES, TRIED_ID], [_BYTES])
    tried = matcher(vocabulary.tokenizer(), grammar)
    for step in range(_STEPS):
        if tried.is_error():
            break
        mask = tried.compute_bitmask()
        ids = [id_ for id_ in (*range(_BYTES), TRIED_ID) if mask[id_ // 8] >> id_ % 8 & 1]
        if tried.is_error() or not ids:
            break
        # Any way through the grammar, as long as it is the same each time.
        tried.consume_token(ids[step * 7919 % len(ids)])
    return str(tried.get_error())


def main() -> None:
    """Reads a grammar, tries it within bounds, and writes its fault."""
    grammar = sys.stdin.buffer.read().decode()
    with open("/proc/self/statm", encoding="ascii") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MIB * _MIB,) * 2)
    # SIGXCPU comes at the first bound; a SIGKILL before the second says that the machine is full.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said: list[str] = []
    threading.stack_size(STACK_MIB * _MIB)
    thread = threading.Thread(target=lambda: said.append(try_out(grammar)))
    thread.start()
    thread.join()
    if not said:
        sys.exit(OUT_OF_MEMORY)
    print(json.dumps({"error": said[0]}))


if __name__ == "__main__":
    main()
