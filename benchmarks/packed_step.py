"""Milliseconds of one packed pass beside transformers' own cached forward, on a random-weight Llama.

Run as `outrider bench packed_step --json`. The cases take turns and the medians are reported, so the ratios
hold on a busy machine. docs/figures.md says what each field means.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.shared.envelope import command_line, print_result
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

CONTEXT = 256
"""Tokens in the cache before a timed pass."""
SHAPES = ((1, 1), (1, 4), (1, 8), (1, 16), (2, 1), (2, 8), (4, 1), (4, 8), (8, 1), (8, 4), (8, 8))
"""(sessions, rows each) of the packed cases."""
OWN_ROWS = (1, 4, 8, 16)
"""Rows of the cases that transformers computes."""
SMALL_LAYERS, SMALL_WIDTH = 4, 64
SMALL_SHAPES = ((1, 1), (1, 17), (8, 17))
"""(sessions, rows each) of the small model's cases."""
WARM_UP = 3
Case = Callable[[], float]
"""Runs one repeat and returns its milliseconds."""


def build(layers: int, width: int = 256) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Two copies of one model: the packed pass changes the first, transformers runs the second."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    ours = LlamaForCausalLM(copy.deepcopy(config)).eval()
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours.requires_grad_(False), theirs.requires_grad_(False)


def transformers_pass(model: LlamaForCausalLM, rows: int) -> Case:
    """A case of transformers' forward of `rows` tokens after the context; the cache is cropped back."""
    cache = DynamicCache(config=model.config)
    step = torch.arange(rows)[None]
    with torch.inference_mode():
        model(torch.arange(CONTEXT)[None], past_key_values=cache)

    def once() -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            model(step, past_key_values=cache, use_cache=True, logits_to_keep=rows)
            spent = time.perf_counter() - started
            cache.crop(-rows)
        return spent * 1e3

    return once


def packed_pass(lm: PackedLM, sessions: int, rows: int) -> Case:
    """A case of a packed pass: per session the last token and a binary tree of `rows - 1` nodes below it."""
    tables = [lm.table(reserve=CONTEXT + rows) for _ in range(sessions)]
    for table in tables:
        lm.forward([SequenceRows(table, range(CONTEXT), range(-1, CONTEXT - 1), ())])
        table.commit(range(CONTEXT))
    parents = [(row + 1) // 2 - 1 for row in range(rows)]

    def once() -> float:
        started = time.perf_counter()
        lm.forward([SequenceRows(table, range(rows), parents, range(rows)) for table in tables])
        spent = time.perf_counter() - started
        for table in tables:
            table.drop_nodes()
        return spent * 1e3

    return once


def overhead(lm: PackedLM, packed: Case) -> Case:
    """A case of what `forward` takes beyond its call of the model, in passes of one shape."""
    own, inside = lm.model.forward, [0.0]

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return own(*given, **named)
        finally:
            inside[0] = (time.perf_counter() - started) * 1e3

    def once() -> float:
        lm.model.forward = timed
        try:
            return packed() - inside[0]
        finally:
            lm.model.forward = own

    return once


def small_cases() -> dict[str, Case]:
    """Cases of a small model, mostly Python: whole passes, and what passes take beyond the model's call."""
    ours, theirs = build(SMALL_LAYERS, SMALL_WIDTH)
    lm = PackedLM(ours)
    lm.pack()
    cases = {f"own_{rows}": transformers_pass(theirs, rows) for rows in (1, 17)}
    for sessions, rows in SMALL_SHAPES:
        packed = packed_pass(lm, sessions, rows)
        cases[f"packed_{sessions}x{rows}"] = packed
        cases[f"overhead_{sessions}x{rows}"] = overhead(lm, packed)
    return cases


def measure(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Median milliseconds of each case by name; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + WARM_UP):
        for name, once in cases.items():
            spent = once()
            if turn >= WARM_UP:
                times[name].append(spent)
    return {name: round(statistics.median(spent), 3) for name, spent in times.items()}


def main() -> None:
    """Measures, prints a table to stderr and the result as the last line of stdout."""
    parser = command_line("packed_step", __doc__)
    parser.add_argument("--repeats", type=int, default=100, help="repeats of each case (default 100)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default 12)")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    ours, theirs = build(settings.layers)
    lm = PackedLM(ours)
    lm.pack()
    cases = {f"own_{rows}": transformers_pass(theirs, rows) for rows in OWN_ROWS}
    cases |= {f"packed_{count}x{rows}": packed_pass(lm, count, rows) for count, rows in SHAPES}
    medians = measure(cases, settings.repeats)
    small = measure(small_cases(), settings.repeats)
    print(f"{'pass':<14}{'ms':>8}{'/ own_1':>9}", file=sys.stderr)
    for name, spent in medians.items():
        print(f"{name:<14}{spent:>8.2f}{spent / medians['own_1']:>9.2f}", file=sys.stderr)
    print(f"{SMALL_LAYERS} layers of {SMALL_WIDTH}:", file=sys.stderr)
    for name, spent in small.items():
        print(f"{name:<14}{spent:>8.3f}{spent / small['own_1']:>9.2f}", file=sys.stderr)
    overheads = {name.removeprefix("overhead_"): ms for name, ms in small.items() if "overhead" in name}
    whole = {name: ms for name, ms in small.items() if "overhead" not in name}
    shape = {"context": CONTEXT, "layers": settings.layers, "repeats": settings.repeats, "threads": 1}
    print_result(
        "packed_step", shape, started, {"ms": medians, "small_ms": whole, "pass_overhead_ms": overheads}
    )


if __name__ == "__main__":
    main()
