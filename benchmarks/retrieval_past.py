"""What past outputs cost: ids taken in per second, memory per id, lookups, reopening.

Synthetic template traffic, so it says nothing about acceptance: each of 200 templates is 10 fixed parts of 20
ids and 9 slots of 1 to 20 ids in between, drawn from 8,000 ids with a heavy head; a request is a random
template with its slots filled anew. Sixteen sessions grow side by side, four ids at a time. Memory is the
growth of the process's resident set, so every measurement has a process of its own. Run `python
benchmarks/retrieval_past.py [--tokens N]`. The last line is one JSON object; arctic-inference stands beside
it where it is installed.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from envelope import REPOSITORY

from retrieval_service.past import Limits, PastOutputs

IDS = 8_000
SESSIONS = 16
PIECE = 4
NODE_LIMIT, DEPTH = 32, 16
LOOKUPS = 5_000

Extend = Callable[[str, list[int]], object]
Finish = Callable[[str], object]
Lookup = Callable[[list[int]], object]


def template_traffic(seed: int) -> Iterator[list[int]]:
    """Requests' outputs without end; the templates are the same for every seed."""
    fixed = random.Random(0)
    templates = [[[fixed.randrange(IDS) for _ in range(20)] for _ in range(10)] for _ in range(200)]
    choose = random.Random(seed)
    while True:
        output: list[int] = []
        for part in choose.choice(templates):
            output += (
                [int(IDS * choose.random() ** 3) for _ in range(choose.randrange(1, 21))] if output else []
            )
            output += part
        yield output


def feed(tokens: int, extend: Extend, finish: Finish) -> tuple[int, float, float]:
    """Ids taken in, at least `tokens`; seconds that took, and of this thread's processor time, without
    generating them."""
    traffic = template_traffic(1)
    fed, spent, worked, wave = 0, 0.0, 0.0, 0
    while fed < tokens:
        outputs = list(islice(traffic, SESSIONS))
        names = [f"{wave}.{number}" for number in range(SESSIONS)]
        longest = max(map(len, outputs))
        started, began = time.perf_counter(), time.thread_time()
        for at in range(0, longest, PIECE):
            for name, output in zip(names, outputs, strict=True):
                if at < len(output):
                    extend(name, output[at : at + PIECE])
        for name in names:
            finish(name)
        spent += time.perf_counter() - started
        worked += time.thread_time() - began
        fed += sum(map(len, outputs))
        wave += 1
    return fed, spent, worked


def lookups(lookup: Lookup) -> dict[str, float]:
    """Milliseconds of lookups in the middle of requests that were not fed; `cpu_` of processor time, which
    other processes do not lengthen."""
    choose = random.Random(2)
    taken, worked = [], []
    for output in islice(template_traffic(3), LOOKUPS):
        ids = output[: choose.randrange(1, len(output))]
        started, began = time.perf_counter(), time.thread_time()
        lookup(ids)
        worked.append(1e3 * (time.thread_time() - began))
        taken.append(1e3 * (time.perf_counter() - started))
    (p50, p99), (cpu_p50, cpu_p99) = np.quantile([taken, worked], (0.5, 0.99), axis=1).T.round(4).tolist()
    return {"p50": p50, "p99": p99, "cpu_p50": cpu_p50, "cpu_p99": cpu_p99}


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def row(tokens: int, extend: Extend, finish: Finish, lookup: Lookup) -> dict[str, Any]:
    """The figures that every memory has."""
    before = resident()
    fed, seconds, worked = feed(tokens, extend, finish)
    return {
        "tokens": fed,
        "insert_tokens_per_second": round(fed / seconds),
        "insert_tokens_per_cpu_second": round(fed / worked),
        "memory_bytes_per_token": round((resident() - before) / fed, 1),
        "lookup_ms": lookups(lookup),
    }


def ours(tokens: int, folder: Path | None) -> dict[str, Any]:
    """PastOutputs, one tenant, with or without a folder; with one, how long it took to open again too."""
    limits = Limits(tenant_tokens=2 * tokens + 100_000, total_tokens=2 * tokens + 100_000)
    outputs = PastOutputs(folder, limits)
    outputs.extend("tenant", "first", [1, 2])
    memory = outputs.memory("tenant")
    result = row(
        tokens,
        lambda name, ids: outputs.extend("tenant", name, ids),
        lambda name: outputs.finish("tenant", name),
        lambda ids: memory.lookup(ids, node_limit=NODE_LIMIT, depth=DEPTH),
    )
    outputs.close()
    if folder is not None:
        result["disk_bytes_per_token"] = round(
            sum(path.stat().st_size for path in folder.rglob("*.*")) / result["tokens"], 1
        )
        started = time.perf_counter()
        PastOutputs(folder, limits).close()
        result["reopen_seconds"] = round(time.perf_counter() - started, 2)
    return result


def full(tokens: int) -> dict[str, Any]:
    """PastOutputs at its limit: every id taken in evicts one."""
    outputs = PastOutputs(None, Limits(tenant_tokens=tokens, total_tokens=2 * tokens))
    feed(
        tokens,
        lambda name, ids: outputs.extend("tenant", name, ids),
        lambda name: outputs.finish("tenant", name),
    )
    fed, seconds, worked = feed(
        tokens // 4,
        lambda name, ids: outputs.extend("tenant", f"again {name}", ids),
        lambda name: outputs.finish("tenant", f"again {name}"),
    )
    return {
        "insert_tokens_per_second": round(fed / seconds),
        "insert_tokens_per_cpu_second": round(fed / worked),
        "evicted": outputs.stats().evicted_tokens,
    }


def arctic(tokens: int) -> dict[str, Any] | None:
    """arctic-inference's suffix cache on the same traffic at its default depth; None where not installed."""
    if importlib.util.find_spec("arctic_inference") is None:
        return None
    cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache()
    growing: set[str] = set()

    def extend(name: str, ids: list[int]) -> None:
        if name not in growing:
            growing.add(name)
            cache.start_request(name, np.array(ids[:1], np.int32))
        cache.add_active_response(name, ids)

    def finish(name: str) -> None:
        growing.discard(name)
        cache.stop_request(name)

    cache.start_request("asks", np.array([1], np.int32))
    return row(
        tokens,
        extend,
        finish,
        lambda ids: cache.speculate(
            "asks",
            np.array(ids[-64:], np.int32),
            max_spec_tokens=NODE_LIMIT,
            max_spec_factor=4.0,
            min_token_prob=0.01,
            use_tree_spec=True,
        ),
    )


def measured(what: str, tokens: int) -> dict[str, Any] | None:
    """A row, from a process of its own: `memory`, `disk`, `full` or `arctic`."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--only", what]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] | None = json.loads(ended.stdout.splitlines()[-1])
    return result


def one(what: str, tokens: int) -> dict[str, Any] | None:
    """A row, measured in this process."""
    if what == "full":
        return full(tokens)
    if what == "arctic":
        return arctic(tokens)
    if what == "memory":
        return ours(tokens, None)
    with tempfile.TemporaryDirectory() as folder:
        return ours(tokens, Path(folder))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("memory", "disk", "full", "arctic"))
    options = parser.parse_args()
    if options.only:
        print(json.dumps(one(options.only, options.tokens)))
        return
    started = time.perf_counter()
    rows = {}
    for what in ("memory", "disk", "full", "arctic"):
        rows[what] = measured(what, options.tokens)
        print(f"{what}: {rows[what]}", flush=True)
    settings = {"tokens": options.tokens, "node_limit": NODE_LIMIT, "depth": DEPTH, "traffic": "template"}
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"settings": settings, "seconds": seconds} | {"rows": rows}, default=str))


if __name__ == "__main__":
    main()
