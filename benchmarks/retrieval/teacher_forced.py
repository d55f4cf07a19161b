"""Replays the target's continuations round by round and counts the drafted tokens that it accepts.

Teacher-forced: the continuations are decoded first, by the packed pass in a process of its own (torch and
FAISS never share a process), so that a slow lookup costs nothing here. Run by benchmarks as `python -m
benchmarks.retrieval.teacher_forced MODEL TOKENS TEMPERATURE`, with prompts on stdin.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.shared.envelope import REPOSITORY, module_command
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from retrieval_service.trie import CountedTrie, counted
from speculative.choice import choose_token
from speculative.digest import RowDigest
from speculative.history import History
from speculative.lookup.suffix_automaton import SuffixAutomaton
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.tree import ROOT

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

BATCH = 32
"""Continuations that are decoded in one batch."""
SESSION_DRAFT = 10
"""Most tokens that the session's own text drafts a round."""
NODES = 16
DEPTH = 10


@dataclass(frozen=True)
class WrittenPrompt:
    """A prompt's ids, and the continuation that is replayed after it."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def continuations(
    model: Path, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0
) -> list[tuple[int, ...]]:
    """The target's continuations of all prompts, decoded by a process of its own.

    The seed of prompt number n is n.
    """
    command = module_command("retrieval.teacher_forced", str(model.resolve()), str(tokens), str(temperature))
    encoded = json.dumps([list(prompt) for prompt in prompts])
    ended = subprocess.run(
        command, input=encoded, capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"the target's process failed: {ended.stderr[-2000:]}")
    return [tuple(ids) for ids in json.loads(ended.stdout.splitlines()[-1])]


def write_continuations(model: Path, tokens: int, temperature: float) -> None:
    """Reads prompts from stdin and writes their continuations to stdout; each ends with its first end id."""
    from outrider.lm.runner import PackedLM

    lm = PackedLM.load(model)
    prompts = json.load(sys.stdin)
    params = SamplingParams(temperature=temperature)
    written: list[list[int]] = []
    for first in range(0, len(prompts), BATCH):
        writers = [
            _Writer(prompt, first + number, params, lm.vocabulary_size)
            for number, prompt in enumerate(prompts[first : first + BATCH])
        ]
        written += _decode(lm, writers, tokens)
    print(json.dumps(written))


class _Writer:
    """Chooses the tokens behind one prompt."""

    def __init__(self, prompt: Sequence[int], seed: int, params: SamplingParams, width: int) -> None:
        self.prompt = prompt
        self.written: list[int] = []
        self._params = params
        self._history = History.of(prompt, len(prompt))
        self._noise = NoiseRows(seed, width)

    def choose(self, digest: RowDigest) -> None:
        """Writes the next token."""
        position = len(self.prompt) + len(self.written)
        drawn = None if self._params.greedy else self._noise.at(position)
        self.written.append(choose_token(digest, self._params, self._history, drawn))
        self._history.extend(self.written[-1:])


def _decode(lm: "PackedLM", writers: Sequence[_Writer], tokens: int) -> list[list[int]]:
    """The continuations of some prompts, decoded in one batch."""
    from outrider.lm.plan import SequenceRows

    tables = []
    for writer in writers:
        prompt = writer.prompt
        table = lm.table(reserve=len(prompt) + tokens)
        outcome = lm.forward([SequenceRows(table, prompt, range(-1, len(prompt) - 1), [len(prompt) - 1])])
        table.commit(list(range(len(prompt))))
        tables.append(table)
        writer.choose(outcome.digest(0))
    for _ in range(tokens - 1):
        going = [n for n, writer in enumerate(writers) if writer.written[-1] not in lm.eos_ids]
        if not going:
            break
        outcome = lm.forward([SequenceRows(tables[n], [writers[n].written[-1]], [-1], [0]) for n in going])
        for row, n in enumerate(going):
            tables[n].commit([0])
            writers[n].choose(outcome.digest(row))
    for table in tables:
        lm.release(table)
    return [writer.written for writer in writers]


class DraftedTree(Protocol):
    """A drafted trie or tree in flat arrays; a root's parent is ROOT."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


def accepted(tree: DraftedTree | None, following: Sequence[int]) -> int:
    """How many of the tokens that follow are a path of the tree from its root."""
    if tree is None:
        return 0
    children = {
        (parent, token): n for n, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node = ROOT
    for count, token in enumerate(following):
        if (node, token) not in children:
            return count
        node = children[node, token]
    return len(following)


def acceptance_length(
    written: Sequence[WrittenPrompt],
    begin: Callable[[WrittenPrompt], Callable[[Sequence[int]], CountedTrie | None]],
) -> float:
    """Tokens per round with a session's own drafts beside those of a memory.

    Args:
        begin: starts a session's lookups; they take the ids so far and give a trie.
    """
    tokens = rounds = 0
    for each in written:
        draft = begin(each)
        ids = list(each.prompt)
        own = SuffixAutomaton(ids)
        rest = each.continuation
        while rest:
            copied = own.draft(SESSION_DRAFT)
            chain = counted([copied.tokens], max(1, copied.match_length), SESSION_DRAFT)
            # The last token is the target's own: a round commits one more than it accepts.
            most = max(accepted(chain, rest[:-1]), accepted(draft(ids), rest[:-1]))
            for token in rest[: most + 1]:
                ids.append(token)
                own.append(token)
            tokens, rounds, rest = tokens + most + 1, rounds + 1, rest[most + 1 :]
    return tokens / rounds


def held_out_continuations(model: Path, prompts: int, tokens: int) -> list[WrittenPrompt]:
    """The first held-out prompts with the target's greedy continuations."""
    tokenizer, records = tokenizer_of(model), held_out_records(prompts)
    ids = [tuple(tokenizer.encode(record["prompt"]).ids) for record in records]
    outputs = continuations(model, ids, tokens)
    return [WrittenPrompt(each["name"], *both) for each, *both in zip(records, ids, outputs, strict=True)]


if __name__ == "__main__":
    write_continuations(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
