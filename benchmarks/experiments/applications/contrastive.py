"""X20: contrastive decoding with the drafter as amateur: less repetition, and drafts for nothing?

The amateur has to run for every token anyway, so its own likeliest tokens are free drafts. The law is a
function of the prefix alone, so the ids of speculative contrastive decoding are those of the plain loop.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.criteria import distinct
from benchmarks.experiments.chains import DRAFT_COST, acceptance_length, all_rounds, pass_cost
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale, log_softmax, logits_along
from benchmarks.plots.curves import Panel
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from benchmarks.shared.resumable import Key
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

BETAS = (0.0, 0.25, 0.5, 1.0)
ALPHA = 0.1
"""Share of the likeliest token's probability that a token needs to be considered."""
LONGER = 3
"""Times as many tokens as other experiments write: repetition takes a while to set in."""
LENGTHS = range(1, 9)
Logits = NDArray[np.float32]


def contrasted(expert: Logits, amateur: Logits, beta: float) -> int:
    """The token of contrastive decoding: (1 + beta) log p - beta log q, where p is at least ALPHA max p.

    Li and others, *Contrastive Decoding* (arXiv 2210.15097), in the form of O'Brien and Lewis (2309.09117).

    Args:
        expert: one row of the target's logits, float32 [V].
        amateur: the drafter's for the same place, float32 [V].
    """
    log_p, log_q = log_softmax(expert), log_softmax(amateur)
    scores = (1 + beta) * log_p - beta * log_q
    scores[log_p < log_p.max() + np.log(ALPHA)] = -np.inf
    return int(scores.argmax())


def written(pair: ModelPair, prompt: Sequence[int], beta: float, tokens: int) -> tuple[list[int], list[bool]]:
    """The text of plain contrastive decoding, and whether the amateur's likeliest token was right."""
    both: tuple[PackedLM, PackedLM] = (pair.target, pair.drafter)
    tables = [lm.table(len(prompt) + tokens) for lm in both]
    text: list[int] = []
    right: list[bool] = []
    fresh = list(prompt)
    while len(text) < tokens and (not text or text[-1] not in pair.target.eos_ids):
        rows = []
        for lm, table in zip(both, tables, strict=True):
            plan = SequenceRows(table, fresh, range(-1, len(fresh) - 1), [len(fresh) - 1])
            rows.append(lm.forward([plan]).rows()[0].copy())
            table.commit(range(len(fresh)))
        token = contrasted(rows[0], rows[1], beta)
        text.append(token)
        right.append(token == int(rows[1].argmax()))
        fresh = [token]
    for lm, table in zip(both, tables, strict=True):
        lm.release(table)
    return text, right


def agreement(pair: ModelPair, beta: float, count: int) -> float:
    """Share of the tokens of held-out texts that contrastive decoding would choose."""
    tokenizer = tokenizer_of(pair.target_path)
    hits = places = 0
    for record in held_out_records(count):
        prompt, rest = (tokenizer.encode(record[name]).ids for name in ("prompt", "continuation"))
        ids = [*prompt, *rest]
        expert, amateur = (logits_along(lm, ids, len(prompt)) for lm in (pair.target, pair.drafter))
        chosen = [contrasted(one, other, beta) for one, other in zip(expert, amateur, strict=True)]
        hits += sum(one == token for one, token in zip(chosen, rest, strict=True))
        places += len(rest)
    return hits / places


def keys(scale: Scale) -> list[Key]:
    """An arm for each strength of the contrast; 0 is the target alone."""
    return [(beta,) for beta in BETAS]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Repetition, agreement with held-out text, and what the amateur's drafts bring."""
    beta = float(key[0])
    done = [written(pair, prompt, beta, LONGER * pair.scale.tokens) for prompt in pair.prompts]
    rights = [right for _, right in done]
    # A round reads the amateur at every drafted place and once more behind the last one, for its contrast.
    speeds = {}
    for length in LENGTHS:
        rounds = all_rounds(rights, length)
        spent = sum(pass_cost(drafted + 1) + DRAFT_COST * (drafted + 1) for drafted, _ in rounds)
        speeds[length] = sum(map(len, rights)) * (1 + DRAFT_COST) / spent
    best = max(speeds, key=lambda length: speeds[length])
    return {
        "beta": beta,
        "tokens": sum(map(len, rights)),
        "repeated_4grams": round(1 - distinct([text for text, _ in done], 4), 4),
        "agreement": round(agreement(pair, beta, pair.scale.prompts), 4),
        "alpha": round(sum(map(sum, rights)) / sum(map(len, rights)), 4),
        "length_8": round(acceptance_length(all_rounds(rights, 8)), 3),
        "best_length": best,
        "speed": round(speeds[best], 3),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    of = {beta: only(rows, beta=beta) for beta in BETAS}
    none, half = of[0.0], of[0.5]
    return (
        Judged(
            f"{none['repeated_4grams']:.3f} of 4-grams without contrast, {half['repeated_4grams']:.3f} at .5",
            half["repeated_4grams"] <= 0.6 * none["repeated_4grams"],
        ),
        Judged(
            f"{none['agreement']:.3f} without contrast, {half['agreement']:.3f} at .5",
            half["agreement"] >= none["agreement"] - 0.02,
        ),
        Judged(f"{half['speed']:.2f} times plain contrastive decoding at .5", 1.3 <= half["speed"] <= 1.8),
        Judged(
            ", ".join(f"{of[beta]['alpha']:.2f}" for beta in BETAS),
            all(of[low]["alpha"] >= of[high]["alpha"] for low, high in pairwise(BETAS)),
        ),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Quality and drafts over the strength of the contrast."""
    ordered = [row for beta in BETAS for row in where(rows, beta=beta)]
    shares = (("repeated 4-grams", "repeated_4grams"), ("held-out tokens chosen", "agreement"))
    drafts = (("amateur's acceptance", "alpha"), ("speed over the plain loop", "speed"))
    return [
        Panel(
            title,
            "beta",
            label,
            tuple(line(name, ordered, "beta", column) for name, column in columns),
        )
        for title, label, columns in (("The text", "share", shares), ("Drafts", "share, times", drafts))
    ]


X20 = Experiment(
    name="X20",
    question="What does contrastive decoding with the drafter as amateur cost, once the drafter drafts too?",
    predictions=(
        "repeated 4-grams fall by 40 % or more at beta .5",
        "held-out tokens are chosen as often, within 2 points",
        "speculative contrastive decoding is 1.3 to 1.8 times as fast as the plain loop at beta .5",
        "the stronger the contrast, the fewer of the amateur's likeliest tokens are right",
    ),
    refuted_by="amateur's drafts that do not pay at beta .5: its own choices are what contrast avoids",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
