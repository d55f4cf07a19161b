"""What past outputs cost: tokens inserted per second, memory per token, time of lookups and of reopening.

The traffic is synthetic and says nothing about acceptance. Each of 200 templates is 10 fixed parts of 20
tokens with 9 slots of 1 to 20 tokens in between, drawn from 8,000 ids with a heavy head. A request is a
random template with its slots filled anew. Sixteen sessions grow side by side, four tokens at a time. Memory
is the growth of the process's resident set, so every measurement has a process of its own. Run `python -m
benchmarks.retrieval.past_cost [--tokens N]`. The last line is one JSON object, with arctic-inference's
figures where it is installed.
"""

import argparse
import gc
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.retrieval.arctic_cache import open_arctic_cache
from benchmarks.shared.envelope import REPOSITORY, module_command
from benchmarks.shared.process_memory import resident_bytes
from outrider.compiling.toolchain import find_compiler
from outrider.runtime.settings import default_cache_dir
from retrieval_service.past.compiled_index import find_library
from retrieval_service.past.outputs import Limits, PastOutputs

VOCABULARY = 8_000
SESSIONS = 16
PIECE = 4
"""Tokens by which a session grows at a time."""
NODE_LIMIT, DEPTH = 32, 16
LOOKUPS = 5_000
ROWS = ("memory", "python", "disk", "full", "arctic")
"""In memory, there with the index in Python, with a folder, at the limit, arctic-inference."""

Extend = Callable[[str, list[int]], object]
Finish = Callable[[str], object]
Lookup = Callable[[list[int]], object]


def template_traffic(seed: int) -> Iterator[list[int]]:
    """Outputs of requests, without end; the templates are the same for every seed."""
    fixed = random.Random(0)
    templates = [[[fixed.randrange(VOCABULARY) for _ in range(20)] for _ in range(10)] for _ in range(200)]
    choose = random.Random(seed)
    while True:
        output: list[int] = []
        for part in choose.choice(templates):
            output += (
                [int(VOCABULARY * choose.random() ** 3) for _ in range(choose.randrange(1, 21))]
                if output
                else []
            )
            output += part
        yield output


def insert(tokens: int, extend: Extend, finish: Finish) -> tuple[int, float, float]:
    """Inserts at least `tokens` tokens: their number, wall seconds and this thread's processor seconds.

    The time that the generator takes is left out of both.
    """
    traffic = template_traffic(1)
    inserted, spent, worked, wave = 0, 0.0, 0.0, 0
    while inserted < tokens:
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
        inserted += sum(map(len, outputs))
        wave += 1
    return inserted, spent, worked


def lookup_quantiles(lookup: Lookup) -> dict[str, float]:
    """Milliseconds of lookups in the middle of requests that were never inserted, by quantile.

    `cpu_` marks processor time, which other processes do not lengthen.
    """
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


def _resident_bytes() -> int:
    gc.collect()
    return resident_bytes()


def memory_row(tokens: int, extend: Extend, finish: Finish, lookup: Lookup) -> dict[str, Any]:
    """The figures that are measured of every memory."""
    before = _resident_bytes()
    inserted, seconds, worked = insert(tokens, extend, finish)
    return {
        "tokens": inserted,
        "insert_tokens_per_second": round(inserted / seconds),
        "insert_tokens_per_cpu_second": round(inserted / worked),
        "memory_bytes_per_token": round((_resident_bytes() - before) / inserted, 1),
        "lookup_ms": lookup_quantiles(lookup),
    }


def opened(folder: Path | None, limits: Limits, compiled: bool = True) -> PastOutputs:
    """Past outputs with the compiled index, where there is a compiler, or with the one in Python."""
    outputs = PastOutputs(folder, limits)
    if compiled and find_compiler() is not None:
        cache_dir = default_cache_dir() or Path(tempfile.gettempdir()) / "outrider"
        library = find_library(cache_dir, lambda: False, compiles=True)
        assert library is not None
        outputs.use(library)
    return outputs


def past_outputs_row(tokens: int, folder: Path | None, compiled: bool = True) -> dict[str, Any]:
    """Figures of PastOutputs with one tenant; with a folder also its bytes on disk and seconds to reopen."""
    limits = Limits(tenant_tokens=2 * tokens + 100_000, total_tokens=2 * tokens + 100_000)
    outputs = opened(folder, limits, compiled)
    outputs.extend("tenant", "first", [1, 2])
    memory = outputs.memory("tenant")
    result = memory_row(
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
        opened(folder, limits, compiled).close()
        result["reopen_seconds"] = round(time.perf_counter() - started, 2)
    return result


def full_row(tokens: int) -> dict[str, Any]:
    """Figures of PastOutputs at its limit, where every inserted token evicts one."""
    outputs = opened(None, Limits(tenant_tokens=tokens, total_tokens=2 * tokens))
    insert(
        tokens,
        lambda name, ids: outputs.extend("tenant", name, ids),
        lambda name: outputs.finish("tenant", name),
    )
    inserted, seconds, worked = insert(
        tokens // 4,
        lambda name, ids: outputs.extend("tenant", f"again {name}", ids),
        lambda name: outputs.finish("tenant", f"again {name}"),
    )
    return {
        "insert_tokens_per_second": round(inserted / seconds),
        "insert_tokens_per_cpu_second": round(inserted / worked),
        "evicted": outputs.stats().evicted_tokens,
    }


def arctic_row(tokens: int) -> dict[str, Any] | None:
    """Figures of arctic-inference's suffix cache on the same traffic; None where it is not installed."""
    cache = open_arctic_cache()
    if cache is None:
        return None
    return memory_row(tokens, cache.extend, cache.finish, lambda ids: cache.speculate(ids, NODE_LIMIT))


def measure_apart(what: str, tokens: int) -> dict[str, Any] | None:
    """One of `ROWS`, measured in a process of its own."""
    command = module_command("retrieval.past_cost", "--tokens", str(tokens), "--only", what)
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] | None = json.loads(ended.stdout.splitlines()[-1])
    return result


def measure_here(what: str, tokens: int) -> dict[str, Any] | None:
    """One of `ROWS`, measured in this process."""
    if what == "full":
        return full_row(tokens)
    if what == "arctic":
        return arctic_row(tokens)
    if what == "memory":
        return past_outputs_row(tokens, None)
    if what == "python":
        return past_outputs_row(tokens, None, compiled=False)
    with tempfile.TemporaryDirectory() as folder:
        return past_outputs_row(tokens, Path(folder))


def main() -> None:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to insert")
    parser.add_argument("--only", choices=ROWS, help="measure this row only")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure_here(options.only, options.tokens)))
        return
    started = time.perf_counter()
    rows = {}
    for what in ROWS:
        rows[what] = measure_apart(what, options.tokens)
        print(f"{what}: {rows[what]}", flush=True)
    settings = {"tokens": options.tokens, "node_limit": NODE_LIMIT, "depth": DEPTH, "traffic": "template"}
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"settings": settings, "seconds": seconds} | {"rows": rows}, default=str))


if __name__ == "__main__":
    main()
