"""Windows of drawn drafts on the wire: nothing is lost, and what no source can have drawn is refused."""

from random import Random
from typing import Any

import numpy as np
import pytest

from outrider.v1 import draft_source_pb2
from outrider.wire.codec import fragment_from_wire, fragment_to_wire
from outrider.wire.drawn import laws_from_wire, laws_to_wire
from speculative.draft_law import UNIT, QuantisedLaw
from speculative.drawn_window import DrawnWindow
from speculative.errors import MalformedDraft

LAWS = (
    QuantisedLaw(np.array([3, 70_000]), np.array([1, UNIT - 1])),
    QuantisedLaw(np.array([9]), np.array([UNIT])),
)


def sent(**changes: Any) -> draft_source_pb2.Draft:
    """A window that draws 3 and 70000 below the base, and 9 below the first, with some fields replaced."""
    window = DrawnWindow(1, 5, 2, 77, (3, 70_000, 9), (-1, -1, 0), (1.0,) * 3, LAWS)
    draft = fragment_to_wire(window, 4)
    for name, value in changes.items():
        if name == "ids":
            del draft.ids[:]
            draft.ids.extend(value)
        else:
            setattr(draft, name, value)
    return draft_source_pb2.Draft.FromString(draft.SerializeToString())


def test_a_window_comes_back_as_it_was() -> None:
    found = fragment_from_wire(sent(), 2)
    assert isinstance(found, DrawnWindow)
    assert (found.source, found.epoch, found.base, found.prefix_hash) == (2, 5, 2, 77)
    assert (found.tokens, found.parents) == ((3, 70_000, 9), (-1, -1, 0))
    assert [(law.ids.tolist(), law.weights.tolist()) for law in found.laws] == [
        (law.ids.tolist(), law.weights.tolist()) for law in LAWS
    ]


def test_a_law_takes_six_bytes_an_id_and_one_for_their_number() -> None:
    assert len(laws_to_wire(LAWS)) == 6 * 3 + 2
    assert sent().survival == b""
    plain = fragment_from_wire(draft_source_pb2.Draft(ids=[1], survival=b"\xff"), 1)
    assert not fragment_to_wire(plain, 1).whole


def law(*entries: tuple[int, int]) -> bytes:
    """The bytes of one law of these ids and weights."""
    parts = [id_.to_bytes(4, "little") + (weight - 1).to_bytes(2, "little") for id_, weight in entries]
    return bytes([len(parts)]) + b"".join(parts)


GOOD = law((9, UNIT))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": law((3, 1), (70_000, UNIT - 2)) + GOOD}, "weights sum to 65535"),
        ({"q": law((3, UNIT), (70_000, 1)) + GOOD}, "weights sum to 65537"),
        ({"q": law((70_000, UNIT - 1), (3, 1)) + GOOD}, "ids do not ascend"),
        ({"q": law((3, 1), (3, UNIT - 1)) + GOOD}, "ids do not ascend"),
        ({"q": laws_to_wire(LAWS)[:-1]}, "q ends amid a law"),
        ({"q": laws_to_wire(LAWS) + GOOD}, "has 3 laws; send one for each"),
        ({"q": laws_to_wire(LAWS[:1])}, "has 1 laws; send one for each"),
        ({"q": b"\0" + GOOD}, "q has 0 ids"),
        ({"q": GOOD * 300}, "more laws than the 255 nodes"),
        ({"q": b""}, "whole without q"),
        ({"whole": False}, "has q and is not whole"),
        ({"ids": [3, 4, 9]}, "holds id 4, to which its q gives no chance"),
        ({"ids": [3, 3, 9], "parents": b"\0\0\x02"}, "repeats a draw; it must have no children"),
        ({"ids": [3, 9, 9], "parents": b"\0\x01\x01"}, "2 nodes at one depth; its base has 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_have_been_drawn_is_malformed(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedDraft, match=said):
        fragment_from_wire(sent(**changes), 1)


def test_all_bytes_are_distributions_or_malformed() -> None:
    """A weight below 0 and NaN have no bytes; weights that pass are above 0 and sum to 1."""
    chance, passed = Random(1), 0
    for _ in range(2000):
        parts = sorted(chance.sample(range(1, UNIT), 2))
        weights = [parts[0], parts[1] - parts[0], UNIT - parts[1]]
        data = bytearray(law(*zip(sorted(chance.sample(range(99), 3)), weights, strict=True)))
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            laws = laws_from_wire(bytes(data))
        except MalformedDraft:
            continue
        passed += 1
        for found in laws:
            assert found.law.weights.min() > 0
            assert found.law.weights.sum() == 1.0
            assert (np.diff(found.ids) > 0).all()
    assert 500 < passed < 1900
