"""Milliseconds of one packed step beside transformers' own forward with its cache, on a random-weight Llama.

Run ``python benchmarks/packed_step.py [--repeats N]``. Cases are interleaved and medians taken, so that the ratios hold on a
busy machine. Prints a table; the last line is one JSON object.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.lm import PackedLM, Share, SlotTable

CONTEXT = 256
SHAPES = ((1, 1), (1, 4), (1, 8), (1, 16), (2, 1), (2, 8), (4, 1), (4, 8), (8, 1), (8, 4), (8, 8))
"""(sessions, rows each) of the packed cases."""


def build() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Two copies of one model: the packed pass takes over the first, the second stays as transformers has it."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    ours = LlamaForCausalLM(copy.deepcopy(config)).eval()
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours.requires_grad_(False), theirs.requires_grad_(False)


def own_forward(model: LlamaForCausalLM, rows: int) -> Callable[[], None]:
    """transformers' forward of ``rows`` tokens after the context, then cropped back."""
    cache = DynamicCache(config=model.config)
    step = torch.arange(rows)[None]
    with torch.inference_mode():
        model(torch.arange(CONTEXT)[None], past_key_values=cache)

    def run() -> None:
        with torch.inference_mode():
            model(step, past_key_values=cache, use_cache=True, logits_to_keep=rows)

    def crop() -> None:
        with torch.inference_mode():
            cache.crop(-rows)

    return _timed(run, crop)


def packed_step(lm: PackedLM, sessions: int, rows: int) -> Callable[[], None]:
    """A packed pass: per session the last token and, below it, a tree of ``rows - 1`` nodes, two children each."""
    tables = [lm.table() for _ in range(sessions)]
    for table in tables:
        lm.forward([Share(table, range(CONTEXT), range(-1, CONTEXT - 1), ())])
        table.commit(range(CONTEXT))
    parents = [(row + 1) // 2 - 1 for row in range(rows)]

    def run() -> None:
        lm.forward([Share(table, range(rows), parents, range(rows)) for table in tables])

    def drop() -> None:
        for table in tables:
            _drop(table)

    return _timed(run, drop)


def _drop(table: SlotTable) -> None:
    table.drop_nodes()


def _timed(run: Callable[[], None], undo: Callable[[], None]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        run()
        spent = time.perf_counter() - start
        undo()
        return spent * 1e3

    return once


def measure(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each case, the cases taking turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 3):
        for name, once in cases.items():
            spent = once()
            if turn >= 3:
                times[name].append(spent)
    return {name: statistics.median(of) for name, of in times.items()}


def main() -> None:
    """Measures, prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    started = time.perf_counter()
    ours, theirs = build()
    lm = PackedLM(ours)
    cases = {f"own {rows}": own_forward(theirs, rows) for rows in (1, 4, 8, 16)}
    cases |= {f"packed {count}x{rows}": packed_step(lm, count, rows) for count, rows in SHAPES}
    medians = measure(cases, repeats)
    print(f"{'case':<14}{'ms':>8}{'/ own 1':>9}   (context {CONTEXT}, one thread, float32)")
    for name, spent in medians.items():
        print(f"{name:<14}{spent:>8.2f}{spent / medians['own 1']:>9.2f}")
    report = {
        "name": "packed_step",
        "machine": platform.processor() or platform.machine(),
        "settings": {"context": CONTEXT, "repeats": repeats, "threads": 1, "torch": torch.__version__},
        "seconds": round(time.perf_counter() - started, 1),
        "ms": {name: round(spent, 3) for name, spent in medians.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
