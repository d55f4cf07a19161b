"""X12: how acceptance changes with the length of the context, for a drafter and for lookup."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.chains import acceptance_length, all_rounds
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale, lookup_accepts, rights
from benchmarks.plots.curves import Panel
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from benchmarks.shared.resumable import Key

CONTEXTS = (128, 256, 512, 1024, 1536, 1900)
LENGTH = 8
TOKENS = 48


def keys(scale: Scale) -> list[Key]:
    """An arm for each length of the context."""
    return [(length,) for length in CONTEXTS]


def long_prompts(pair: ModelPair, length: int, count: int) -> list[tuple[int, ...]]:
    """The `length` tokens before one and the same place of held-out modules that are long enough for all."""
    tokenizer = tokenizer_of(pair.target_path)
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for name in dict.fromkeys(record["name"] for record in held_out_records(24)):
        path = library / name
        ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids if path.is_file() else []
        if len(ids) > CONTEXTS[-1]:
            found.append(tuple(ids[CONTEXTS[-1] - length : CONTEXTS[-1]]))
    return found[:count]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance of the drafter and of lookup behind contexts of one length."""
    length = int(key[0])
    prompts = long_prompts(pair, length, pair.scale.prompts)
    texts = pair.write(prompts, 0.0, TOKENS)
    drafter = rights(pair.drafter, texts)
    copied = [each for text in texts for each in lookup_accepts(text, LENGTH)]
    return {
        "context": length,
        "texts": len(texts),
        "alpha": round(sum(map(sum, drafter)) / sum(map(len, drafter)), 4),
        "drafter": round(acceptance_length(all_rounds(drafter, LENGTH)), 3),
        "lookup": round(acceptance_length(copied), 3),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    alpha = {length: only(rows, context=length)["alpha"] for length in CONTEXTS}
    short, middle, long = alpha[256], alpha[1024], alpha[1900]
    lookup = {length: only(rows, context=length)["lookup"] for length in CONTEXTS}
    return (
        Judged(f"{short:.2f} at 256, {middle:.2f} at 1,024", abs(middle - short) <= 0.05),
        Judged(f"{middle:.2f} at 1,024, {long:.2f} at 1,900", long < middle),
        Judged(f"{lookup[128]:.2f} at 128, {lookup[1900]:.2f} at 1,900", lookup[1900] > lookup[128]),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Acceptance and tokens a round over the context."""
    ordered = [row for length in CONTEXTS for row in where(rows, context=length)]
    lengths = tuple(line(source, ordered, "context", source) for source in ("drafter", "lookup"))
    return (
        Panel("The drafter", "context", "acceptance", (line("drafter", ordered, "context", "alpha"),), True),
        Panel(f"Chains of {LENGTH} tokens", "context", "tokens per round", lengths, is_log_x=True),
    )


X12 = Experiment(
    name="X12",
    question="What does the length of the context do to drafts?",
    predictions=(
        "the drafter's acceptance is flat to 1,024 tokens (within 5 points of that at 256)",
        "it falls beyond, where pair and drafter saw little text in training",
        "lookup accepts more in long contexts, which have more to copy",
    ),
    refuted_by="a drafter that loses more than 5 points within the length that it was trained for",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
