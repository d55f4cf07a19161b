"""What nearest contexts are compared by: the nearest state among those that the known token follows."""

import numpy as np

from benchmarks.retrieval.nearest_contexts import WINDOW, Place, States, agreed, figures


def test_copied_tokens_count_up_to_the_first_wrong_one() -> None:
    assert agreed((1, 2, 3), (1, 2, 4)) == 2
    assert agreed((), (1,)) == 0
    assert agreed((1, 2), (1,)) == 1


def test_the_nearest_state_that_the_known_token_follows_is_copied_from() -> None:
    drawn = np.random.default_rng(4)
    rows = drawn.integers(0, 50, (2, WINDOW)).astype(np.uint32)
    features = [drawn.standard_normal((2, WINDOW, 16)).astype(np.float16)]
    state, known = features[0][1, 30], int(rows[1, 31])
    future = tuple(int(token) for token in rows[1, 32:42])
    places = [
        Place(state, known, future, 5, future[:2]),
        Place(state, 60, future, 1, ()),
    ]
    found, _ = States(rows, features, 0).copied(places)
    assert found == [future, ()], "no state is near where the text never has the known token"
    counted = figures(places, found)
    assert counted["match"]["states"]["tokens_right"] == len(future)
    assert counted["match"]["suffix"]["tokens_right"] == 2
    assert counted["no_match"]["either"]["first_right"] == 0
