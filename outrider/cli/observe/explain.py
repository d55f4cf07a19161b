"""`outrider explain`: shows the rounds of one session, as a table or as one JSON object."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from outrider.cli.access import NOTHING_TO_SHOW, Access
from outrider.v1 import explain_pb2
from outrider.wire.codec import epoch_to_text, finish_from_wire
from outrider.wire.names import LOOKUP_BELOW, PREDICTION, REFERENCES

WIDTH = 150
INDENT = 4
"""Columns by which a tree indents each level."""
TARGET = "target"
"""Name of the source of tokens that no source drafted."""
RESTS = {
    explain_pb2.SourceState.REST_NONE: None,
    explain_pb2.SourceState.REST_GAINS_TOO_LITTLE: "gains too little",
    explain_pb2.SourceState.REST_NOT_ADMITTED: "not admitted",
    explain_pb2.SourceState.REST_COMPARED: "compared",
}
"""Why a source was left alone."""
INSIDE = frozenset({"lookup", LOOKUP_BELOW, PREDICTION, REFERENCES})
"""Sources inside the verifier that may rest; what they cost the target's steps is not measured."""
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
    tree: bool = False,
    as_json: bool,
) -> None:
    """Fetches the rounds of a session and prints them. Raises OutriderError, CommandFailed."""
    with access.client(address) as client:
        explanation = client.explain(session, tenant=tenant, choice=choice, nodes=tree)
    incarnations = [as_object(one) for one in explanation.incarnations]
    if as_json:
        print(json.dumps({"session": session, "incarnations": incarnations}))
        return
    width = None if Console().is_terminal else WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for one in incarnations:
        show(one, console)
        if tree:
            show_trees(one, console)


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
    trees = {"nodes": _nodes(one, names), "tokens": _tokens(one, names)} if one.tokens else {}
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
        "sources": {names[state.source - 1]: _state(state) for state in one.source_states},
        **trees,
    }


def _state(one: explain_pb2.SourceState) -> dict[str, Any]:
    return {
        "rest": RESTS.get(one.rest, str(one.rest)),
        "slowdown": round(one.slowdown, 3) if one.HasField("slowdown") else None,
        "weights_version": one.weights_version,
    }


def _nodes(one: explain_pb2.Round, names: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "id": node.id,
            "text": node.text,
            "parent": node.parent - 1,
            "source": names[node.source - 1],
            "survival": round(node.survival, 4),
            "accepted": node.accepted,
        }
        for node in one.nodes
    ]


def _tokens(one: explain_pb2.Round, names: list[str]) -> list[dict[str, Any]]:
    return [
        {"id": token.id, "text": token.text, "source": names[token.source - 1] if token.source else TARGET}
        for token in one.tokens
    ]


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


def show_trees(one: dict[str, Any], console: Console) -> None:
    """Prints the tree of each round that has one: the accepted tokens are bold and marked."""
    for round_ in one["rounds"]:
        if "tokens" not in round_:
            continue
        said = " ".join(f"{_quoted(token)} ({token['source']})" for token in round_["tokens"])
        root = Tree(f"round {round_['round']}, position {round_['position']}: {said}")
        branches, indents, width = [root], [0], console.width
        for node in round_["nodes"]:
            label = Text(f"{_quoted(node)}  {node['source']} {node['survival']:.2f}")
            if node["accepted"]:
                label = Text(f"{label.plain}  accepted", style="bold green")
            branches.append(branches[node["parent"] + 1].add(label))
            indents.append(indents[node["parent"] + 1] + INDENT)
            width = max(width, indents[-1] + label.cell_len)
        # The library leaves out what is to the right of the width: a draft may be a chain of hundreds.
        narrow, console.width = console.width, width
        console.print(root)
        console.width = narrow


def _quoted(token: dict[str, Any]) -> str:
    """A token's text in quotes, control characters escaped; the token's id if there is no tokenizer."""
    if not token["text"]:
        return f"#{token['id']}"
    quoted = json.dumps(token["text"], ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in quoted)


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
    yield from _states(rounds)


def _states(rounds: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each source that may rest: when it rested, what it costs, which weights drafted."""
    for name in sorted({name for one in rounds for name in one["sources"]}):
        states = [one["sources"][name] for one in rounds if name in one["sources"]]
        rests = Counter(state["rest"] for state in states if state["rest"])
        why = ", ".join(f"{count} {rest}" for rest, count in rests.most_common())
        said = f"{name}: left alone in {rests.total()} of {len(states)} rounds" + (f" ({why})" if why else "")
        measured = [state["slowdown"] for state in states if state["slowdown"] is not None]
        if name not in INSIDE:
            said += f"; slows steps down by {measured[-1]:.0%}" if measured else "; slowdown not measured"
        versions = [state["weights_version"] for state in states]
        if any(versions):
            said += f"; weights version {_range(versions)}"
        yield said


def _range(versions: list[int]) -> str:
    return str(versions[0]) if versions[0] == versions[-1] else f"{versions[0]} to {versions[-1]}"


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total
