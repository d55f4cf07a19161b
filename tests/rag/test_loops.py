"""Guessing what searches find changes no id, whatever is guessed."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rag.loops import RagText, speculative_loop
from outrider.rag.passages import FoundPassages, RagPassage
from outrider.rag.stride import AdaptiveStride, FixedStride, Stride
from speculative.stop import FinishReason
from tests.rag.world import END, PASSAGES, World, new_text, plain


class PlannedGuesses(FoundPassages):
    """Guesses right or wrong as planned, over and over."""

    def __init__(self, world: World, plan: tuple[bool, ...]) -> None:
        super().__init__(world, 10)
        self._world = world
        self._plan = plan
        self._asked = 0

    def best(self, query: str) -> RagPassage | None:
        true = self._world.true_passage(query)
        right = self._plan[self._asked % len(self._plan)]
        self._asked += 1
        return true if right else next(passage for passage in PASSAGES if passage != true)


def guessed(world: World, known: FoundPassages, stride: Stride, most: int = 12, every: int = 2) -> RagText:
    return world.run(speculative_loop(new_text(most, every, prefetch=2), known, stride))


def same(one: RagText, other: RagText) -> bool:
    return (one.ids, one.passages, one.reason) == (other.ids, other.passages, other.reason)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_every_pattern_of_right_and_wrong_guesses_gives_the_plain_loops_ids(stride: int) -> None:
    ended, wrong = set(), 0
    for seed, plan in product(range(6), product((True, False), repeat=5)):
        world = World(seed, vocabulary=14)
        expected = plain(world)
        found = guessed(world, PlannedGuesses(world, plan), FixedStride(stride))

        assert same(found, expected), (seed, plan)
        ended.add(expected.reason)
        wrong += found.counts.wrong
    assert ended == {FinishReason.STOP, FinishReason.LENGTH}
    assert wrong > 50


@given(
    seed=st.integers(0, 10_000),
    most=st.integers(1, 40),
    every=st.integers(1, 9),
    kept=st.integers(1, 6),
    guesses=st.one_of(st.integers(1, 16), st.just("adaptive")),
    names=st.lists(st.integers(0, len(PASSAGES) - 1), max_size=5),
)
def test_any_passages_to_guess_from_give_the_plain_loops_ids(
    seed: int, most: int, every: int, kept: int, guesses: int | str, names: list[int]
) -> None:
    world = World(seed)
    known = FoundPassages(world, kept)
    known.add([PASSAGES[name] for name in names])
    stride = AdaptiveStride() if guesses == "adaptive" else FixedStride(int(guesses))

    assert same(guessed(world, known, stride, most, every), plain(world, most, every))


def test_right_guesses_save_searches() -> None:
    world = next(world for world in map(World, range(100)) if plain(world, 24).reason is FinishReason.LENGTH)
    world.searches.clear()

    found = guessed(world, PlannedGuesses(world, (True,)), FixedStride(4), most=24)

    assert world.searches == [1, 4, 4, 3]
    assert (found.counts.accuracy, found.counts.discarded, found.counts.pieces) == (1.0, 0, 12)


def test_wrong_guesses_cost_their_text_and_one_search_each() -> None:
    world = next(world for world in map(World, range(100)) if plain(world, 8).reason is FinishReason.LENGTH)
    world.searches.clear()

    found = guessed(world, PlannedGuesses(world, (False,)), FixedStride(1), most=8)

    assert world.searches == [1, 1, 1, 1]
    assert (found.counts.right, found.counts.wrong, found.counts.accuracy) == (0, 3, 0.0)
    assert found.counts.pieces == 7


def test_an_end_behind_a_wrong_guess_is_taken_back() -> None:
    """A wrong passage may let the model end the text where the right one does not."""
    taken_back = 0
    for seed in range(60):
        world = World(seed, vocabulary=14)
        expected = plain(world)
        found = guessed(world, PlannedGuesses(world, (False,)), FixedStride(2))
        taken_back += found.counts.discarded > 0 and END not in expected.ids
        assert same(found, expected)
    assert taken_back


def test_the_oldest_passages_are_dropped_first() -> None:
    known = FoundPassages(World(0), 2)
    known.add(PASSAGES[:2])
    known.add(PASSAGES[1:3])

    assert len(known) == 2
    assert known.best("any") in PASSAGES[1:3]


def test_nothing_is_guessed_from_no_passages() -> None:
    assert FoundPassages(World(0), 2).best("any") is None
