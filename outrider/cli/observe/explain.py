"""`outrider explain`: shows the rounds of one session, as a table or as one JSON object."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.cli.access import NOTHING_TO_SHOW, Access
from outrider.v1 import explain_pb2
from outrider.wire.codec import epoch_to_text, finish_from_wire

WIDTH = 150
COLUMNS = (
    ("round", "right"),
    ("step", "right"),
    ("at ms", "right"),
    ("position", "right"),
    ("read", "right"),
    ("drafted", "left"),
    ("verified", "right"),
    ("accepted", "left"),
    ("committed", "right"),
    ("with", "right"),
    ("waited ms", "right"),
    ("pass ms", "right"),
)


def run_explain(
    address: str,
    session: str,
    *,
    tenant: str,
    choice: int,
    access: Access = NOTHING_TO_SHOW,
    as_json: bool,
) -> None:
    """Fetches the rounds of a session and prints them. Raises OutriderError, CommandFailed."""
    with access.client(address) as client:
        explanation = client.explain(session, tenant=tenant, choice=choice)
    incarnations = [as_object(one) for one in explanation.incarnations]
    if as_json:
        print(json.dumps({"session": session, "incarnations": incarnations}))
        return
    width = None if Console().is_terminal else WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for one in incarnations:
        show(one, console)


def as_object(one: explain_pb2.Incarnation) -> dict[str, Any]:
    """The object that --json prints for a session under one epoch."""
    names = list(one.source_names)
    finished = finish_from_wire(one.finished)
    return {
        "verifier": one.verifier,
        "epoch": epoch_to_text(one.epoch),
        "prompt_tokens": one.prompt_tokens,
        "node_limit": one.node_limit,
        "sources": names,
        "finished": None if finished is None else finished.value,
        "rounds_forgotten": one.forgotten,
        "rounds": [_round(number, found, names) for number, found in enumerate(one.rounds, one.forgotten)],
    }


def _round(number: int, one: explain_pb2.Round, names: list[str]) -> dict[str, Any]:
    shares = [(names[share.source - 1], share) for share in one.by_source]
    return {
        "round": number,
        "step": one.step,
        "at_ms": round(one.at_ms, 3),
        "position": one.position,
        "pending": one.pending,
        "prompt_passes": one.prompt_passes,
        "drafted": {name: share.drafted for name, share in shares if share.drafted},
        "candidates": one.candidates,
        "admitted": one.admitted,
        "admitted_by_source": {name: share.admitted for name, share in shares if share.admitted},
        "accepted": {name: share.accepted for name, share in shares if share.accepted},
        "committed": one.committed,
        "sessions": one.sessions,
        "rows": one.rows,
        "waited_ms": round(one.waited_ms, 3),
        "forward_ms": round(one.forward_ms, 3),
    }


def show(one: dict[str, Any], console: Console) -> None:
    """Prints one incarnation: its head, a line for each round, and the sums."""
    console.print(
        f"verifier {one['verifier']}, epoch {one['epoch']}: a prompt of {one['prompt_tokens']} ids, at most "
        f"{one['node_limit']} nodes a round, {one['finished'] or 'running'}"
    )
    if one["rounds_forgotten"]:
        console.print(f"{one['rounds_forgotten']} earlier rounds are kept no longer")
    table = Table(box=None, pad_edge=False)
    for name, side in COLUMNS:
        table.add_column(name, justify="right" if side == "right" else "left")
    for round_ in one["rounds"]:
        table.add_row(*_cells(round_))
    console.print(table)
    console.print("\n".join(_sums(one["rounds"])))


def _cells(one: dict[str, Any]) -> Iterator[str]:
    yield str(one["round"])
    yield str(one["step"])
    yield f"{one['at_ms']:.1f}"
    yield str(one["position"])
    yield str(one["pending"]) + (f" (+{one['prompt_passes']} passes)" if one["prompt_passes"] else "")
    yield _counts(one["drafted"])
    yield f"{one['admitted']} of {one['candidates']}"
    yield _counts(one["accepted"])
    yield str(one["committed"])
    yield str(one["sessions"] - 1)
    yield f"{one['waited_ms']:.2f}"
    yield f"{one['forward_ms']:.2f}"


def _counts(by_source: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in by_source.items()) or "-"


def _sums(rounds: list[dict[str, Any]]) -> Iterator[str]:
    committed = sum(one["committed"] for one in rounds)
    if not rounds:
        yield "no round yet"
        return
    yield f"{len(rounds)} rounds, {committed} tokens: {committed / len(rounds):.2f} a round"
    drafted, admitted, accepted = (
        _added(one[field] for one in rounds) for field in ("drafted", "admitted_by_source", "accepted")
    )
    for name in sorted(drafted | admitted):
        yield f"{name}: {drafted[name]} drafted, {admitted[name]} verified, {accepted[name]} accepted"


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total
