"""Measures small costs that the docs name, in processor time, each with the real part and no services.

Run as `outrider bench small_costs --json`. docs/figures/small_costs.md says what each field means.
"""

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.process_memory import resident_mb
from benchmarks.shared.process_time import processor_s
from orchestrator.front.http.bodies.pool import MODULE
from orchestrator.front.http.spawning import spawned
from outrider.lm.compiled.row_kernel import use_row_kernel
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.runtime.settings import cache_folder
from retrieval_service.dense.matching import DocumentText
from retrieval_service.dense.near_documents import LIMITS
from retrieval_service.joint_tree import FoundTrie, JointTree, Sampling, TreeBounds
from retrieval_service.ranking import DraftShape
from retrieval_service.trie import CountedTrie, counted
from retrieval_service.trust import TrustBook
from speculative.batch_choice import RowChoice
from speculative.digest import HostDigest
from speculative.history import History
from speculative.noise import PositionNoise
from speculative.params import SamplingParams
from speculative.sampling_kernel import current_kernel

VOCABULARY, NODES, DEPTH = 4096, 96, 16
MATCHES = (1, 4, 16, 64)
"""Lengths of the matches that are looked up, in tokens."""
SHAPE = DraftShape()
BOUNDS = TreeBounds(SHAPE.nodes, DEPTH, VOCABULARY)
SAMPLED_IDS, SAMPLED_ROWS = 128_256, 8
SAMPLED = {
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
}
"""Requests whose rows are chosen."""
CHUNK = 64
"""Rows of a prompt's chunk."""
IDLE_S, READER_S = 1.0, 30.0
"""Seconds without work after which a process has started, and the most that a start may take."""


def spent_ms(work: Callable[[], object], repeats: int) -> float:
    """Median processor time of this thread for one call, after a first call that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        work()
        taken.append((time.thread_time_ns() - began) / 1e6)
    return round(statistics.median(taken), 4)


def lookup_figures(repeats: int) -> dict[str, float]:
    """Ms of a lookup in as many tokens of documents as a session has at most, by length of the match."""
    chance = np.random.default_rng(0)
    parts = [chance.integers(VOCABULARY, size=LIMITS.tokens // 4).astype(np.int32) for _ in range(4)]
    text = DocumentText(parts)
    found = {}
    for length in MATCHES:
        end = int(chance.integers(LIMITS.tokens // 8, LIMITS.tokens // 4 - DEPTH))
        # An id that the documents lack ends the match at this length.
        session = [VOCABULARY, *parts[3][end - length : end].tolist()]
        assert text.match(session)[1] >= length
        found[str(length)] = spent_ms(partial(text.lookup, session, node_limit=NODES, depth=DEPTH), repeats)
    return found


def full_trie() -> CountedTrie:
    """A trie of NODES nodes, of continuations whose first tokens often agree."""
    chance = np.random.default_rng(1)
    made = counted(
        ((chance.integers(8, size=DEPTH) // (1 + np.arange(DEPTH) % 2)).tolist() for _ in range(64)), 8, NODES
    )
    assert made is not None
    assert len(made) == NODES
    return made


def tree_figures(repeats: int) -> dict[str, float]:
    """Ms of a draft's tree from one memory's trie of NODES nodes, by mode; each time at another place."""
    found, trust, places = {1: FoundTrie("past", full_trie())}, TrustBook().session(""), count(100)

    def tree(sampling: Sampling | None) -> JointTree:
        return JointTree(found, trust, sampling, SHAPE, BOUNDS)

    return {
        "greedy": spent_ms(lambda: tree(None), repeats),
        "sampled": spent_ms(lambda: tree(Sampling(7, next(places))), repeats),
    }


def sampled_row_figures(repeats: int) -> dict[str, float] | None:
    """Ms in which the kernel draws one row's leads, and chooses a row's token; None without a compiler."""
    use_row_kernel(cache_folder(), lambda: False)
    kernel = current_kernel()
    if kernel is None:
        return None
    shape, history = (SAMPLED_ROWS, SAMPLED_IDS), History.of([1, 2], 2)
    rows = np.random.default_rng(0).normal(scale=4.0, size=shape).astype(np.float32)
    found = {"leads": spent_ms(lambda: kernel.leads(7, 3, SAMPLED_IDS), repeats)}
    for name, params in SAMPLED.items():
        choices = [
            RowChoice(HostDigest(row), params, history, PositionNoise(seed, 3, SAMPLED_IDS))
            for seed, row in enumerate(rows)
        ]
        found[name] = round(spent_ms(partial(kernel.tokens, choices), repeats) / SAMPLED_ROWS, 4)
    return found


class CallCounter(TorchDispatchMode):
    """Counts the operators that torch runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def pass_figures(target: str, context: int, repeats: int) -> dict[str, Any]:
    """Operators of an eager pass of one row; ms of one row and of a prompt's chunk, by positions before."""
    lm = PackedLM.load(target, check=False)
    found: dict[str, Any] = {"row_ms": {}, "chunk_ms": {}}
    for length in (CHUNK, context):
        table = lm.table(reserve=length + CHUNK)
        lm.forward([SequenceRows(table, [5] * length, range(-1, length - 1), ())])
        table.commit(range(length))

        def computed(rows: int, table: SlotTable = table) -> None:
            lm.forward([SequenceRows(table, [5] * rows, range(-1, rows - 1), (rows - 1,))])
            table.drop_nodes()

        for name, rows in (("row_ms", 1), ("chunk_ms", CHUNK)):
            found[name][str(length)] = spent_ms(partial(computed, rows), repeats)
        with CallCounter() as counting:
            computed(1)
        lm.release(table)
    return {"eager_pass_operators": counting.calls, **found}


async def reader_figures() -> dict[str, float]:
    """Processor seconds and MiB of a process that reads bodies, once it waits for its first body."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await spawned(MODULE, theirs)
        try:
            before, spent, deadline = -1.0, 0.0, time.monotonic() + READER_S
            while not spent or spent != before:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the process still computes after {READER_S:g} s")
                await asyncio.sleep(IDLE_S)
                before, spent = spent, processor_s(process.pid)
            return {"processor_s": round(spent, 2), "mb": round(resident_mb(process.pid), 1)}
        finally:
            process.kill()
            process.wait()


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("small_costs", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--context", type=int, default=1800, help="positions before the later chunk")
    parser.add_argument("--repeats", type=int, default=200, help="calls of each lookup and tree")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    fields = {
        "document_lookup_ms": lookup_figures(settings.repeats),
        "tree_ms": tree_figures(settings.repeats),
        "sampled_row_ms": sampled_row_figures(settings.repeats),
        "reader_process": asyncio.run(reader_figures()),
        **pass_figures(settings.target, settings.context, max(3, settings.repeats // 20)),
    }
    print_result("small_costs", settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
