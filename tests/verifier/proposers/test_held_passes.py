"""Passes that are held for proposers with planes are merged into as few pieces as keep their order."""

from typing import Any, cast

import pytest
import torch

from outrider.lm.kv.pool import Run
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import SeenRound
from verifier_service.proposers.planes.held_passes import MOST_ROWS, HeldPasses

A, B = (cast(Session, object()) for _ in range(2))
FEATURES = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)


def seen(handle: int, first: int, rows: tuple[int, ...], *runs: Run) -> tuple[Session, SeenRound]:
    shown = SeenRound(handle, first + len(rows), (), None, first, rows, runs)
    return (A if handle == 1 else B, shown)


def pieces(*passes: list[tuple[Session, SeenRound]]) -> list[list[tuple[Any, ...]]]:
    held = HeldPasses()
    for each in passes:
        held.add(each, FEATURES)
    return [
        [(shown.handle, shown.first, shown.rows, shown.runs) for _, shown in piece.seen]
        for piece in held.pieces()
    ]


def test_rounds_that_follow_each_other_become_one_round_of_each_session() -> None:
    first = [seen(1, 5, (0, 2), (5, 7)), seen(2, 9, (4,), (40, 41))]
    second = [seen(2, 10, (1,), (41, 42)), seen(1, 7, (3, 4), (7, 9))]
    assert pieces(first, second) == [
        [(1, 5, (0, 1, 4, 5), ((5, 7), (7, 9))), (2, 9, (2, 3), ((40, 41), (41, 42)))]
    ]


def test_a_piece_has_the_hidden_states_of_its_rows_in_their_order() -> None:
    held = HeldPasses()
    held.add([seen(1, 5, (6, 2), (5, 7))], FEATURES)
    held.add([seen(1, 7, (3,), (7, 8))], FEATURES)
    (piece,) = held.pieces()
    assert piece.passes == 2
    assert piece.features is not None
    assert torch.equal(piece.features, FEATURES[:, [6, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_hidden_states_are_copies(dtype: torch.dtype) -> None:
    held, features = HeldPasses(), FEATURES.to(dtype, copy=True)
    held.add([seen(1, 5, (6, 2), (5, 7))], features)
    kept = features[:, [6, 2]].clone()
    features.zero_()
    (piece,) = held.pieces()
    assert piece.features is not None
    assert torch.equal(piece.features, kept)


@pytest.mark.parametrize(
    "later",
    [
        seen(2, 0, (0,), (5, 6)),  # another session has the slot now
        seen(1, 6, (0,), (5, 6)),  # the session itself got it again, elsewhere
        seen(1, 5, (0,), (80, 81)),  # the session computes a position again
    ],
)
def test_what_cannot_be_merged_comes_later(later: tuple[Session, SeenRound]) -> None:
    assert len(pieces([seen(1, 5, (1,), (5, 6))], [later])) == 2


def test_no_more_than_so_many_rows_are_held() -> None:
    held = HeldPasses()
    assert held.has_room(MOST_ROWS)
    assert not held.has_room(MOST_ROWS + 1)
    held.add([seen(1, 5, (1,), (5, 6))], FEATURES)
    assert not held.has_room(MOST_ROWS)


def test_the_end_of_a_session_is_noticed() -> None:
    held = HeldPasses()
    held.add([seen(1, 5, (1,), (5, 6))], FEATURES)
    assert held.end(1) == 6
    assert held.end(2) is None
    assert not held.has_ended_sessions({1: A}.get)
    assert held.has_ended_sessions({1: B}.get)
    assert held.has_ended_sessions({}.get)
