"""What an output has replaced once applies wherever the text has it again."""

from speculative.lookup.edits import LearntEdits

TEXT = [1, 2, 3, 1, 2, 4, 1]


def learnt(*edits: tuple[list[int], list[int]]) -> LearntEdits:
    found = LearntEdits()
    for old, new in edits:
        found.learn(old, new)
    return found


def test_an_edit_applies_where_all_of_its_old_ids_stand() -> None:
    edits = learnt(([1, 2, 3], [9]))
    assert [place for place in range(len(TEXT)) if edits.at(TEXT, place)] == [0]
    assert edits.at(TEXT, 0) == ((1, 2, 3), (9,))


def test_of_two_edits_with_one_first_id_the_later_one_applies() -> None:
    edits = learnt(([1, 2, 3], [9]), ([1, 2], [8, 8]))
    assert [place for place in range(len(TEXT)) if edits.at(TEXT, place)] == [0, 3]


def test_empty_and_long_sides_are_not_learnt() -> None:
    assert not learnt(([], [5]), ([5], []), ([5] * 9, [6]), ([6], [5] * 9))


def test_a_forgotten_edit_applies_nowhere() -> None:
    edits = learnt(([1], [9]))
    edits.forget(1)
    edits.forget(2)
    assert edits.at(TEXT, 0) is None


def test_the_oldest_of_many_edits_is_forgotten() -> None:
    edits = learnt(*(([old], [7]) for old in range(65)))
    assert edits.at([0], 0) is None
    assert edits.at([1], 0) is not None
