"""X5: do several drafts beat one? Trees of the same number of nodes, by the most children of a node."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key
from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.pair.simulation import Scene, Simulation, Tally

NODES = {False: (2, 4, 8, 16, 32), True: (1, 2, 4, 6, 8, 12, 16, 24, 32)}
"""Nodes of a round, by whether the experiment is run in full."""
CHILDREN = (1, 2, 4)
LEAST = 0.001
"""Survival below which nothing is drafted."""
TEMPERATURES = (0.0, 0.8)


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature, number of nodes and number of children."""
    return [(t, nodes, most) for t in TEMPERATURES for nodes in NODES[scale.is_full] for most in CHILDREN]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Accepted tokens a round of trees of a number of nodes, from a drafter that is never late."""
    temperature, nodes, most = float(key[0]), int(key[1]), int(key[2])
    tally, drafter = Tally(), CausalLMDrafter(pair.drafter)
    # A long pause before each pass lets even a chain, one node a pass of the drafter, fill its nodes.
    scene = Scene(
        drafter_step=0.05, drafter_row=0.0, way=0.0, between=20.0, node_limit=nodes, in_flight=4 * nodes
    )
    for text in pair.texts(temperature):
        Simulation(drafter, text, Growth(children=most, floor=LEAST), scene, tally).run()
    return {
        "temperature": temperature,
        "nodes": nodes,
        "children": most,
        "accepted": round(tally.tokens / tally.rounds - 1, 3),
        "nodes_used": round((tally.target_rows - tally.rounds) / tally.rounds, 2),
        "rounds": tally.rounds,
    }


def gain(rows: Rows, temperature: float, nodes: int) -> float:
    """Tokens a round of trees over those of chains of the same number of nodes."""
    chain, tree = (
        only(rows, temperature=temperature, nodes=nodes, children=most)["accepted"] + 1
        for most in (1, CHILDREN[-1])
    )
    return float(tree / chain)


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    few = {t: gain(rows, t, 4) for t in TEMPERATURES}
    greedy, sampled = (gain(rows, t, 16) for t in TEMPERATURES)
    return (
        Judged(
            f"{few[0.0]:.3f} greedy, {few[0.8]:.3f} at .8",
            all(abs(each - 1) <= 0.05 for each in few.values()),
        ),
        Judged(f"{greedy:.3f} of the chain's tokens a round", 1.10 <= greedy <= 1.15),
        Judged(f"{sampled:.3f} of the chain's tokens a round", 1.20 <= sampled <= 1.30),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Accepted tokens over nodes, a line for each number of children."""
    return [
        Panel(
            f"Temperature {temperature:g}",
            "nodes of a round",
            "accepted tokens a round",
            tuple(
                line(
                    "chain" if most == 1 else f"{most} children",
                    where(rows, temperature=temperature, children=most),
                    "nodes",
                    "accepted",
                )
                for most in CHILDREN
            ),
            is_log_x=True,
        )
        for temperature in TEMPERATURES
    ]


X5 = Experiment(
    name="X5",
    question="Do several drafts beat one of the same number of nodes?",
    predictions=(
        "up to 4 nodes trees and chains have the same tokens a round, within 5 %",
        "at 16 nodes trees have 10 to 15 % more, greedy",
        "at 16 nodes and temperature .8 they have 20 to 30 % more",
    ),
    refuted_by="trees that are no better than chains at 16 nodes, greedy and sampled",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
