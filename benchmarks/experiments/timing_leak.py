"""What a cache that sessions share tells someone who measures time, with tenants and without.

A victim's outputs are remembered as past outputs. An attacker sends prompts and asks of each whether the
victim sent it, from the number of rounds alone: rounds decide the time, whatever the network adds to it.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows, only, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from outrider.pair.simulation import Truth
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.trie import Memory
from speculative.tree import ROOT

NODES, DEPTH = 16, 10
TEMPERATURES, OTHER_SEEDS = (0.8, 0.0), 1000
SHARED, OWN = "one tenant", "a tenant each"
VICTIM, ATTACKER = "victim", "attacker"


def keys(scale: Scale) -> list[Key]:
    """An arm for each way to share and each temperature."""
    return [(arm, temperature) for temperature in TEMPERATURES for arm in (SHARED, OWN)]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Rounds of the attacker's requests: for prompts that the victim had sent before, and for others.

    Victim and attacker have seeds of their own: where both sample, a prompt alone does not give the victim's
    text, and where both are greedy it does.
    """
    arm, temperature = str(key[0]), float(key[1])
    texts = pair.texts(temperature)
    probes = pair.texts(temperature, OTHER_SEEDS)
    tenant = VICTIM if arm == SHARED else ATTACKER
    seen = range(0, len(texts), 2)
    past = PastOutputs(None)
    try:
        for number in seen:
            text = texts[number]
            past.extend(VICTIM, str(number), list(text.ids[text.prompt_length :]))
            past.finish(VICTIM, str(number))
        spent = [rounds_of_probe(probe, past.memory(tenant)) for probe in probes]
    finally:
        past.close()
    rates = [
        rounds / (len(probe.ids) - probe.prompt_length) for rounds, probe in zip(spent, probes, strict=True)
    ]
    hit = [rates[number] for number in seen]
    miss = [rate for number, rate in enumerate(rates) if number % 2]
    baseline = [rounds_of_probe(probe, None) for probe in probes]
    return {
        "arm": arm,
        "temperature": temperature,
        "seen": [round(each, 4) for each in hit],
        "not_seen": [round(each, 4) for each in miss],
        "right": round(best_guess(hit, miss), 4),
        "auc": round(area(hit, miss), 4),
        "changed": sum(one != other for one, other in zip(spent, baseline, strict=True)),
    }


def rounds_of_probe(text: Truth, memory: Memory | None) -> int:
    """Rounds of a request that a memory alone drafts for; without a memory, one for each token."""
    place, rounds = text.prompt_length, 0
    while place < len(text.ids):
        rest = text.ids[place:]
        trie = None if memory is None else memory.lookup(text.ids[:place], node_limit=NODES, depth=DEPTH)
        place += 1
        if trie is not None:
            children = {
                (parent, token): node
                for node, (parent, token) in enumerate(zip(trie.parents, trie.tokens, strict=True))
            }
            node = ROOT
            for token in rest[:-1]:
                if (node, token) not in children:
                    break
                node = children[node, token]
                place += 1
        rounds += 1
    return rounds


def best_guess(hit: Sequence[float], miss: Sequence[float]) -> float:
    """Share of right guesses with the best threshold, which an attacker would have to know beforehand."""
    most = 0.5
    for threshold in (*hit, *miss):
        caught = sum(each <= threshold for each in hit) / len(hit)
        spared = sum(each > threshold for each in miss) / len(miss)
        most = max(most, (caught + spared) / 2)
    return most


def area(hit: Sequence[float], miss: Sequence[float]) -> float:
    """Chance that a request that was seen took fewer rounds than one that was not; a tie is half of one."""
    pairs = [(one, other) for one in hit for other in miss]
    return sum(1.0 if one < other else 0.5 if one == other else 0.0 for one, other in pairs) / len(pairs)


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    shared, exact = (only(rows, arm=SHARED, temperature=at) for at in TEMPERATURES)
    own = sum(row["changed"] for row in where(rows, arm=OWN))
    return (
        Judged(f"{shared['auc']:.2f} of pairs, {shared['right']:.2f} of guesses right", shared["auc"] >= 0.9),
        Judged(f"{exact['auc']:.2f} of pairs, {exact['right']:.2f} of guesses right", exact["auc"] >= 0.99),
        Judged(f"{own} requests took other rounds than without a memory", own == 0),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """The share of right guesses at every threshold, by arm."""
    curves = []
    for row in rows:
        thresholds = sorted({*row["seen"], *row["not_seen"]})
        caught = [sum(each <= at for each in row["seen"]) / len(row["seen"]) for at in thresholds]
        falsely = [sum(each <= at for each in row["not_seen"]) / len(row["not_seen"]) for at in thresholds]
        label = f"{row['arm']}, T = {row['temperature']:g}"
        curves.append(Curve(label, (0.0, *falsely), (0.0, *caught)))
    curves.append(Curve("guessing", (0.0, 1.0), (0.0, 1.0), True))
    return (Panel("Was this prompt sent before?", "false alarms", "found", tuple(curves)),)


LEAK = Experiment(
    name="leak",
    question="What does a shared cache of past outputs tell an attacker who measures time?",
    predictions=(
        "with one tenant for all, a prompt that was sent before takes fewer rounds than one that was not "
        "in 90 % of pairs, though victim and attacker sample with other seeds",
        "where both are greedy, it does in 99 %",
        "with a tenant each, not one request takes another number of rounds than without any memory",
    ),
    refuted_by="a request whose rounds depend on another tenant's text",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
