"""What corpora and past outputs gain over a session's own text: parts of `outrider bench retrieval`.

Teacher-forced, see teacher_forced.py; documents_gain.py does the same for documents. Every lookup is waited
for, so no draft is late.
"""

import random
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.retrieval.arctic_cache import open_arctic_cache
from benchmarks.retrieval.teacher_forced import (
    DEPTH,
    NODES,
    WrittenPrompt,
    acceptance_length,
    continuations,
)
from benchmarks.shared.heldout import HELD_OUT, tokenizer_of
from outrider.cli.local.demo_corpus import demo_corpus, installed_source, kept_out
from outrider.runtime.settings import cache_folder
from outrider.tokens import TokenTable
from retrieval_service.corpus.build import build
from retrieval_service.corpus.encoding import TokenizedText
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.plan import CorpusSettings
from retrieval_service.corpus.texts import TextSource
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.trie import CountedTrie, Memory

TEMPLATE = '''class {name}({base}):
    """{what} of a {thing}, with its {field}."""

    def __init__(self, {field}, {other}=None):
        super().__init__()
        self.{field} = {field}
        self.{other} = {other}

    def {verb}(self, {thing}):
'''
_SLOTS = {
    "name": ["Reader", "Writer", "Parser", "Handler", "Stream", "Buffer", "Queue", "Cache", "Proxy", "Timer"],
    "base": ["object", "Exception", "ValueError", "dict", "list", "BaseHandler", "Thread", "Protocol"],
    "what": ["A view", "One end", "The state", "A copy", "The owner", "A record"],
    "thing": ["file", "socket", "message", "request", "node", "path", "token", "header", "line", "event"],
    "field": ["name", "size", "mode", "flags", "timeout", "encoding", "level", "count", "prefix", "key"],
    "other": ["parent", "default", "lock", "logger", "callback", "limit", "factory", "cookie"],
    "verb": ["read", "write", "send", "parse", "close", "update", "check", "format", "get", "handle"],
}


def requests(count: int) -> list[str]:
    """`count` different requests of one template, the same in every run."""
    drawn, made = random.Random(0), dict[str, None]()
    while len(made) < count:
        made[TEMPLATE.format(**{slot: drawn.choice(words) for slot, words in _SLOTS.items()})] = None
    return list(made)


def corpus_figures(model: Path, written: Sequence[WrittenPrompt], folder: Path) -> dict[str, float]:
    """Acceptance length with an eighth, a half and all of the demonstration's corpus, by its tokens."""
    tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
    whole = CorpusIndex.open(demo_corpus(tokens, HELD_OUT), tokens.digest)
    files = installed_source(Path(sysconfig.get_path("purelib")))
    found = {}
    for parts in (8, 2):
        part = folder / f"corpus-{parts}"
        build(part, CorpusSettings(tokens.digest, tokens.size, None), _text(tokens, files[::parts]))
        index = CorpusIndex.open(part, tokens.digest)
        found[str(index.header.tokens)] = _with_memory(index, written)
    found[str(whole.header.tokens)] = _with_memory(whole, written)
    return found


def past_figures(
    model: Path, counts: Sequence[int], fresh_count: int, tokens: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Acceptance length of `fresh_count` requests of the template, by the number of other requests before.

    The second result is of arctic-inference's suffix cache; its values are None where that is not installed.
    """
    tokenizer = tokenizer_of(model)
    prompts = [tuple(tokenizer.encode(text).ids) for text in requests(max(counts) + fresh_count)]
    outputs = continuations(model, prompts, tokens)
    fresh = [
        WrittenPrompt(str(n), prompt, output)
        for n, (prompt, output) in enumerate(zip(prompts[:fresh_count], outputs[:fresh_count], strict=True))
    ]
    found = {}
    for count in counts:
        past = PastOutputs(None)
        for number, output in enumerate(islice(outputs, fresh_count, fresh_count + count)):
            past.extend("tenant", str(number), list(output))
            past.finish("tenant", str(number))
        found[f"past_{count}"] = _with_memory(past.memory("tenant"), fresh)
        past.close()
    return found, {
        str(count): _with_arctic(fresh, outputs[fresh_count : fresh_count + count]) for count in counts
    }


def session_only(written: Sequence[WrittenPrompt]) -> float:
    """Acceptance length with the session's own text alone."""
    return round(acceptance_length(written, lambda _: lambda _: None), 3)


def _with_memory(memory: Memory, written: Sequence[WrittenPrompt]) -> float:
    return round(
        acceptance_length(written, lambda _: lambda ids: memory.lookup(ids, node_limit=NODES, depth=DEPTH)),
        3,
    )


def _with_arctic(written: Sequence[WrittenPrompt], earlier: Sequence[Sequence[int]]) -> float | None:
    cache = open_arctic_cache()
    if cache is None:
        return None
    for number, output in enumerate(earlier):
        cache.begin(str(number), [0])
        cache.extend(str(number), output)
        cache.finish(str(number))

    def draft(ids: Sequence[int]) -> CountedTrie | None:
        made = cache.speculate(ids, NODES)
        if not made.token_ids:
            return None
        ones = (1,) * len(made.token_ids)
        return CountedTrie(tuple(made.token_ids), tuple(made.parents), ones, 1, max(1, made.match_len))

    return round(acceptance_length(written, lambda _: draft), 3)


def _text(tokens: TokenTable, files: Sequence[Path]) -> Any:
    return TokenizedText(
        TextSource(tuple(files)), tokens, TextSource(tuple(kept_out(HELD_OUT, cache_folder())))
    )
