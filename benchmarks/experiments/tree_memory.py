"""X14: what draft trees take: key-value slots beside those of the text, and rows for each accepted token."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.plan import SequenceRows
from outrider.pair.simulation import Scene, Simulation, Tally

NODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 700, 1500)
SESSIONS = {False: (1, 4), True: (1, 8, 32)}
"""Sessions at a time, by whether the experiment is run in full."""


def keys(scale: Scale) -> list[Key]:
    """Rows by node limit, then slots by sessions and context."""
    rows: list[Key] = [("rows", nodes) for nodes in NODES]
    slots: list[Key] = [
        ("slots", sessions, context) for sessions in SESSIONS[scale.is_full] for context in CONTEXTS
    ]
    return rows + slots


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """The row of one arm."""
    if key[0] == "rows":
        return rows_per_accepted(pair, int(key[1]))
    return slots_of_trees(pair, int(key[1]), int(key[2]))


def rows_per_accepted(pair: ModelPair, nodes: int) -> dict[str, Any]:
    """Rows of the target for each accepted token, with a drafter that keeps a tree of `nodes` nodes full."""
    tally, drafter = Tally(), CausalLMDrafter(pair.drafter)
    # Passes that take no time leave the tree's size as the only bound.
    scene = Scene(drafter_step=0.05, drafter_row=0.0, way=0.0, node_limit=nodes, in_flight=4 * nodes)
    for text in pair.texts(0.0):
        Simulation(drafter, text, Growth(floor=0.001), scene, tally).run()
    accepted = tally.tokens - tally.rounds
    return {
        "what": "rows",
        "nodes": nodes,
        "acceptance_length": round(tally.tokens / tally.rounds, 3),
        "rows_per_accepted": round((tally.target_rows - tally.rounds) / max(1, accepted), 3),
    }


def slots_of_trees(pair: ModelPair, sessions: int, context: int) -> dict[str, Any]:
    """Blocks of keys and values that trees of each size take beside the text's own."""
    lm = pair.target
    tables = [lm.table() for _ in range(sessions)]
    ids = [1] * context
    for table in tables:
        lm.forward([SequenceRows(table, ids, range(-1, context - 1), [context - 1])])
        table.commit(range(context))
    text = lm.pool.used_slots
    extra = []
    for nodes in NODES:
        lm.forward([SequenceRows(table, [1] * (nodes + 1), [-1] + [0] * nodes, [0]) for table in tables])
        extra.append((lm.pool.used_slots - text) / BLOCK / sessions)
        for table in tables:
            table.drop_nodes()
    for table in tables:
        lm.release(table)
    return {
        "what": "slots",
        "sessions": sessions,
        "context": context,
        "text_slots": text // sessions,
        "blocks_by_nodes": [round(each, 3) for each in extra],
        "kib_a_block": round(lm.pool.bytes() / lm.pool.slots * BLOCK / 1024, 1),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    at = {nodes: only(rows, what="rows", nodes=nodes)["rows_per_accepted"] for nodes in NODES}
    blocks = where(rows, what="slots")
    sixteen = max(row["blocks_by_nodes"][NODES.index(16)] for row in blocks)
    most = max(max(row["blocks_by_nodes"]) for row in blocks)
    return (
        Judged(f"{sixteen:.2f} blocks a session at 16 nodes, {most:.2f} at 64", sixteen <= 2),
        Judged(f"{at[16]:.1f} rows for an accepted token at 16 nodes", 3 <= at[16] <= 5),
        Judged(f"{at[64]:.1f} at 64 nodes", 8 <= at[64] <= 12),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Rows for an accepted token, and blocks a session, over the nodes of a tree."""
    by_nodes = where(rows, what="rows")
    curves = tuple(
        Curve(f"{row['sessions']} sessions of {row['context']}", NODES, tuple(row["blocks_by_nodes"]))
        for row in where(rows, what="slots")
    )
    return (
        Panel(
            "Rows of the target",
            "nodes of a tree",
            "per accepted token",
            (line("embedded pair", by_nodes, "nodes", "rows_per_accepted"),),
            is_log_x=True,
        ),
        Panel("Keys and values of the tree", "nodes of a tree", "blocks a session", curves, is_log_x=True),
    )


X14 = Experiment(
    name="X14",
    question="What do draft trees cost in memory and in rows?",
    predictions=(
        "a tree of 16 nodes takes at most the rest of the text's last block and one block more",
        "3 to 5 rows of the target for each accepted token at 16 nodes",
        "8 to 12 at 64 nodes",
    ),
    refuted_by="key-value memory of trees that grows with the context",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
