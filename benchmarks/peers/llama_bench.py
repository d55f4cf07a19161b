"""Passes of llama.cpp as its own benchmark program, `llama-bench`, times them."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "llama-bench"


def pass_times(
    program: str, model: Path, rows: Sequence[int], context: int, threads: int, repeats: int
) -> dict[int, list[float]]:
    """Milliseconds of each timed pass behind `context` tokens, by its number of rows.

    llama-bench keeps keys and values in float16, as it takes no float32, and computes the logits of a pass'
    last row alone. Flash attention is off, as in ours. Exits where the program fails.
    """
    command = [
        *(program, "--model", str(model), "--n-gen", "0", "--n-prompt", ",".join(map(str, rows))),
        *("--n-depth", str(context), "--threads", str(threads), "--repetitions", str(repeats)),
        *("--flash-attn", "0", "--n-gpu-layers", "0", "--output", "json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {last}")
    cases = json.loads(done.stdout)
    return {case["n_prompt"]: [spent / 1e6 for spent in case["samples_ns"]] for case in cases}
