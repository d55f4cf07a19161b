"""The output of `outrider explain` for a session's rounds."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from outrider import client
from outrider.cli.observe import explain
from outrider.v1 import common_pb2, explain_pb2
from outrider.wire.epochs import wall_clock_ms

EPOCH = wall_clock_ms() << 20


def incarnation() -> explain_pb2.Incarnation:
    share = explain_pb2.SourceShare
    return explain_pb2.Incarnation(
        epoch=EPOCH,
        verifier="10.0.0.1:50051",
        prompt_tokens=6,
        node_limit=16,
        source_names=["lookup", "drafter"],
        forgotten=2,
        finished=common_pb2.FINISH_REASON_LENGTH,
        rounds=[
            explain_pb2.Round(
                step=7,
                at_ms=1.25,
                position=6,
                pending=6,
                prompt_passes=1,
                committed=1,
                sessions=1,
                rows=6,
                forward_ms=2.0,
            ),
            explain_pb2.Round(
                step=8,
                at_ms=4.0,
                position=7,
                pending=1,
                candidates=9,
                admitted=5,
                committed=4,
                sessions=2,
                rows=8,
                waited_ms=0.5,
                forward_ms=2.5,
                by_source=[
                    share(source=1, drafted=3, admitted=1),
                    share(source=2, drafted=8, admitted=4, accepted=3),
                ],
            ),
        ],
    )


def test_a_round_says_by_name_what_sources_did() -> None:
    said = explain.as_object(incarnation())
    assert (said["verifier"], said["finished"], said["rounds_forgotten"]) == ("10.0.0.1:50051", "length", 2)
    _, second = said["rounds"]
    assert second["round"] == 3
    assert second["drafted"] == {"lookup": 3, "drafter": 8}
    assert second["admitted_by_source"] == {"lookup": 1, "drafter": 4}
    assert second["accepted"] == {"drafter": 3}
    assert (second["candidates"], second["admitted"], second["committed"]) == (9, 5, 4)
    json.dumps(said)


def test_a_table_has_a_line_for_each_round_and_the_sums() -> None:
    console = Console(file=io.StringIO(), width=explain.WIDTH, highlight=False, markup=False)
    explain.show(explain.as_object(incarnation()), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("verifier 10.0.0.1:50051, epoch ")
    assert lines[1] == "2 earlier rounds are kept no longer"
    assert "6 (+1 passes)" in lines[3]
    assert lines[4].split()[:4] == ["3", "8", "4.0", "7"]
    assert "5 of 9" in lines[4]
    assert lines[5] == "2 rounds, 5 tokens: 2.50 a round"
    assert lines[6:] == [
        "drafter: 8 drafted, 4 verified, 3 accepted",
        "lookup: 3 drafted, 1 verified, 0 accepted",
    ]


def test_the_sums_say_what_a_source_costs_why_it_was_left_alone_and_which_weights_drafted() -> None:
    state = explain_pb2.SourceState
    found = incarnation()
    found.rounds[0].source_states.append(state(source=2, rest=state.REST_NONE, weights_version=3))
    compared = state(source=2, rest=state.REST_COMPARED, slowdown=0.18, weights_version=4)
    found.rounds[1].source_states.append(compared)
    for one, rest in zip(found.rounds, (state.REST_NONE, state.REST_GAINS_TOO_LITTLE), strict=True):
        one.source_states.append(state(source=1, rest=rest))
    said = explain.as_object(found)
    states = said["rounds"][0]["sources"]
    assert states["drafter"] == {"rest": None, "slowdown": None, "weights_version": 3}
    assert said["rounds"][1]["sources"]["drafter"]["rest"] == "compared"
    console = Console(file=io.StringIO(), width=explain.WIDTH, highlight=False, markup=False)
    explain.show(said, console)
    assert console.file.getvalue().splitlines()[-2:] == [  # type: ignore[attr-defined]
        "drafter: left alone in 1 of 2 rounds (1 compared); slows steps down by 18%; weights version 3 to 4",
        "lookup: left alone in 1 of 2 rounds (1 gains too little)",
    ]


def test_a_tree_shows_each_node_below_its_parent_and_what_was_accepted() -> None:
    found = incarnation()
    node, token = explain_pb2.RoundNode, explain_pb2.RoundToken
    found.rounds[1].nodes.extend(
        [
            node(id=4, source=2, survival=0.9, accepted=True, text=" in"),
            node(id=5, parent=1, source=2, survival=0.5),
            node(id=6, source=1, survival=0.25, text='"'),
        ]
    )
    found.rounds[1].tokens.extend([token(id=4, source=2, text=" in"), token(id=8, text=" x")])
    said = explain.as_object(found)
    assert "nodes" not in said["rounds"][0]
    assert [one["parent"] for one in said["rounds"][1]["nodes"]] == [-1, 0, -1]
    console = Console(file=io.StringIO(), width=explain.WIDTH, highlight=False, markup=False)
    explain.show_trees(said, console)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        'round 3, position 7: " in" (drafter) " x" (target)',
        '├── " in"  drafter 0.90  accepted',
        "│   └── #5  drafter 0.50",
        '└── "\\""  lookup 0.25',
    ]


def test_a_tree_deeper_than_the_terminal_is_wide_is_shown_whole() -> None:
    found = incarnation()
    for depth in range(60):
        found.rounds[1].nodes.add(id=100 + depth, parent=depth, source=1, survival=0.5)
    found.rounds[1].tokens.add(id=100, source=1)
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    explain.show_trees(explain.as_object(found), console)
    _, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("── ")[1] for line in lines] == [f"#{100 + depth}  lookup 0.50" for depth in range(60)]
    assert console.width == 80


def test_a_tree_prints_nothing_that_a_terminal_obeys() -> None:
    found = incarnation()
    found.rounds[1].tokens.add(id=4, source=1, text="a\x1b[31m\x9b31m\u202e\u00e9")
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    explain.show_trees(explain.as_object(found), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert '"a\\u001b[31m\\u009b31m\\u202e\u00e9" (lookup)' in printed
    assert printed.replace("\n", "").isprintable()


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    class Fake:
        def __init__(self, address: str, **shown: Any) -> None:
            asked.append(address)

        def __enter__(self) -> "Fake":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def explain(
            self, session: str, *, tenant: str, choice: int, nodes: bool
        ) -> explain_pb2.ExplainResponse:
            asked.append((session, tenant, choice, nodes))
            return explain_pb2.ExplainResponse(incarnations=[incarnation()])

    monkeypatch.setattr(client, "Client", Fake)
    explain.run_explain("a:1", "mine", tenant="us", choice=1, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert asked == ["a:1", ("mine", "us", 1, False)]
    assert said["session"] == "mine"
    assert len(said["incarnations"]) == 1
