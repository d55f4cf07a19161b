"""A cheap source drafts for the drafter: the same tree, in fewer passes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_service.cascade import CheapChain
from drafter_service.draft_tree import Growth
from drafter_service.session import DraftingSession
from outrider.source.events import DecodingRequest
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.drafter.support.fake_drafter import FakeDrafter, report, run_pass, session_of

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
WAYS = {"greedy": SamplingParams(temperature=0), "sampled": SamplingParams(temperature=0.8, top_p=0.95)}
PLAIN = Growth(children=2, scale=0.4, floor=0.05, depth=6)
CASCADED = Growth(children=2, scale=0.4, floor=0.05, depth=6, cascade=4)


class Repeating(FakeDrafter):
    """Its logits depend on the last id alone, so that what it drafts soon repeats itself."""

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return super().logits(ids[-1:])


def grow_out(drafter: FakeDrafter, session: DraftingSession) -> int:
    """Grows until nothing is worth computing; returns the number of passes."""
    passes = 0
    while run_pass(drafter, session):
        passes += 1
        session.take_fragments()
    return passes


def paths(session: DraftingSession) -> dict[tuple[int, ...], float]:
    """Every node in flight: its drafted path and survival."""
    return {session._path(node): node.survival for node in session._tree.nodes() if node.sent}


def moved(
    growth: Growth, params: SamplingParams, request_for: Callable[..., DecodingRequest], wrong: float
) -> tuple[list[dict[tuple[int, ...], float]], int]:
    """The tree after each commit, grown out, and the number of passes; a part of the commits is `wrong`."""
    drafter, chance = Repeating(), random.Random(5)
    session = session_of(request_for(PROMPT, params=params), drafter.open(0), drafter.abilities, growth)
    ids, trees, passes = list(PROMPT), [], 0
    for _ in range(30):
        passes += grow_out(drafter, session)
        trees.append(paths(session))
        likely = max(trees[-1], key=lambda path: (len(path), trees[-1][path]), default=())
        run = [*likely[: chance.randint(1, 3)]] if chance.random() >= wrong else [chance.randrange(24)]
        run = run or [chance.randrange(24)]
        ids += run
        report(session, len(ids) - len(run), run, prefix_hash(ids))
    return trees, passes


@pytest.mark.parametrize("wrong", [0.0, 0.3])
@pytest.mark.parametrize("way", WAYS)
def test_the_tree_is_the_drafter_s_own_whatever_was_guessed(
    request_for: Callable[..., DecodingRequest], way: str, wrong: float
) -> None:
    plain, _ = moved(PLAIN, WAYS[way], request_for, wrong)
    cascaded, _ = moved(CASCADED, WAYS[way], request_for, wrong)
    for one, other in zip(plain, cascaded, strict=True):
        assert one == other
    assert max(map(len, plain)) > 4


def test_text_that_repeats_itself_takes_fewer_passes_for_the_same_nodes(
    request_for: Callable[..., DecodingRequest],
) -> None:
    chain = replace(PLAIN, children=1, floor=1e-6)
    _, plain = moved(chain, WAYS["greedy"], request_for, 0.0)
    _, cascaded = moved(replace(chain, cascade=4), WAYS["greedy"], request_for, 0.0)
    assert cascaded < 0.8 * plain


def test_what_followed_earlier_is_guessed_below_a_path_that_follows_it_too() -> None:
    chain = CheapChain([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert chain.below((), 2) == (4, 5)
    assert chain.below((4,), 3) == (5, 6, 1)
    assert chain.below((9,), 3) == ()
    assert chain.below((4,), 0) == ()
    chain.commit([4])
    assert chain.below((5,), 1) == (6,)
    chain.commit([7])
    assert chain.below((), 1) == (), "that has not occurred before"


def test_guesses_that_are_not_drawn_are_made_ever_less_often() -> None:
    chain = CheapChain([1, 2, 3, 4, 1, 2, 3])
    made = 0
    for _ in range(200):
        guessed = chain.below((), 2)
        made += bool(guessed)
        if guessed:
            chain.learn(len(guessed), 0)
    assert made < 40
    for _ in range(40):
        chain.learn(2, 2)
    assert chain.below((), 2) == (4, 1)
