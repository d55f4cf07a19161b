"""What corpora and past outputs gain over a session's own text: parts of `outrider bench retrieval`.

Teacher-forced like `retrieval_dense`, which does the same for references: the target's greedy continuations
come first, and every round has what all memories know by then, so these figures know no lateness.
"""

import importlib
import importlib.util
import json
import random
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from envelope import REPOSITORY
from retrieval_dense import DEPTH, NODES, Written, acceptance_length, continuations
from tokenizers import Tokenizer

from outrider.cli.local.demo_corpus import cache_folder, demo_corpus, installed_source, kept_out
from outrider.tokens import TokenTable
from retrieval_service.corpus.build import build
from retrieval_service.corpus.encoding import TokenizedText
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.plan import CorpusSettings
from retrieval_service.corpus.texts import TextSource
from retrieval_service.past import PastOutputs
from retrieval_service.trie import CountedTrie, Memory

HELD_OUT = REPOSITORY / "models" / "heldout.jsonl"
TEMPLATE = '''class {name}({base}):
    """{what} of a {thing}, with its {field}."""

    def __init__(self, {field}, {other}=None):
        super().__init__()
        self.{field} = {field}
        self.{other} = {other}

    def {verb}(self, {thing}):
'''
_WORDS = {
    "name": ["Reader", "Writer", "Parser", "Handler", "Stream", "Buffer", "Queue", "Cache", "Proxy", "Timer"],
    "base": ["object", "Exception", "ValueError", "dict", "list", "BaseHandler", "Thread", "Protocol"],
    "what": ["A view", "One end", "The state", "A copy", "The owner", "A record"],
    "thing": ["file", "socket", "message", "request", "node", "path", "token", "header", "line", "event"],
    "field": ["name", "size", "mode", "flags", "timeout", "encoding", "level", "count", "prefix", "key"],
    "other": ["parent", "default", "lock", "logger", "callback", "limit", "factory", "cookie"],
    "verb": ["read", "write", "send", "parse", "close", "update", "check", "format", "get", "handle"],
}


def requests(count: int) -> list[str]:
    """So many different requests of one template, always the same."""
    drawn, made = random.Random(0), dict[str, None]()
    while len(made) < count:
        made[TEMPLATE.format(**{slot: drawn.choice(words) for slot, words in _WORDS.items()})] = None
    return list(made)


def corpus_figures(model: Path, written: Sequence[Written], folder: Path) -> dict[str, float]:
    """Acceptance length with an eighth of the demonstration's corpus, a half of it, and all, by tokens."""
    tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
    whole = CorpusIndex.open(demo_corpus(tokens, HELD_OUT), tokens.digest)
    files = _files()
    found = {}
    for parts in (8, 2):
        part = folder / f"corpus-{parts}"
        build(part, CorpusSettings(tokens.digest, tokens.size, None), _text(tokens, files[::parts]))
        index = CorpusIndex.open(part, tokens.digest)
        found[str(index.header.tokens)] = _with(index, written)
    found[str(whole.header.tokens)] = _with(whole, written)
    return found


def past_figures(
    model: Path, counts: Sequence[int], asked: int, tokens: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Acceptance length of `asked` fresh requests of the template after so many different others.

    Also with arctic-inference's suffix cache in place of ours; None where that is not installed.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in requests(max(counts) + asked)]
    outputs = continuations(model, prompts, tokens)
    fresh = [
        Written(str(n), prompt, output)
        for n, (prompt, output) in enumerate(zip(prompts[:asked], outputs[:asked], strict=True))
    ]
    found = {}
    for count in counts:
        past = PastOutputs(None)
        for number, output in enumerate(islice(outputs, asked, asked + count)):
            past.extend("tenant", str(number), list(output))
            past.finish("tenant", str(number))
        found[f"past_{count}"] = _with(past.memory("tenant"), fresh)
        past.close()
    return found, {str(count): _with_arctic(fresh, outputs[asked : asked + count]) for count in counts}


def held_out(model: Path, prompts: int, tokens: int) -> list[Written]:
    """Held-out prompts, and what the target says after them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    held = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[:prompts]]
    ids = [tuple(tokenizer.encode(one["prompt"]).ids) for one in held]
    outputs = continuations(model, ids, tokens)
    return [Written(one["name"], *both) for one, *both in zip(held, ids, outputs, strict=True)]


def session_only(written: Sequence[Written]) -> float:
    """Acceptance length with what the session itself holds."""
    return round(acceptance_length(written, lambda _: lambda _: None), 3)


def _with(memory: Memory, written: Sequence[Written]) -> float:
    return round(
        acceptance_length(written, lambda _: lambda ids: memory.lookup(ids, node_limit=NODES, depth=DEPTH)),
        3,
    )


def _with_arctic(written: Sequence[Written], earlier: Sequence[Sequence[int]]) -> float | None:
    if importlib.util.find_spec("arctic_inference") is None:
        return None
    cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache()
    for number, output in enumerate(earlier):
        cache.start_request(number, np.array([0], np.int32))
        cache.add_active_response(number, list(output))
        cache.stop_request(number)
    cache.start_request("asks", np.array([0], np.int32))

    def draft(ids: Sequence[int]) -> CountedTrie | None:
        context = np.array(ids[-64:], np.int32)
        made = cache.speculate(
            "asks",
            context,
            max_spec_tokens=NODES,
            max_spec_factor=4.0,
            min_token_prob=0.01,
            use_tree_spec=True,
        )
        if not made.token_ids:
            return None
        ones = (1,) * len(made.token_ids)
        return CountedTrie(tuple(made.token_ids), tuple(made.parents), ones, 1, max(1, made.match_len))

    return round(acceptance_length(written, lambda _: draft), 3)


def _files() -> list[Path]:
    return installed_source(Path(sysconfig.get_path("purelib")))


def _text(tokens: TokenTable, files: Sequence[Path]) -> Any:
    return TokenizedText(
        TextSource(tuple(files)), tokens, TextSource(tuple(kept_out(HELD_OUT, cache_folder())))
    )
