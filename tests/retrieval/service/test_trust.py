"""How far memories are trusted: from a prior by the length of the match to what sessions have shown."""

import random

import pytest

from retrieval_service.trust import Expert, TrustBook, kind_of
from speculative.lookup import survival


def expert(memory: str, token: int, match_length: int = 8, occurrences: int = 1) -> Expert:
    return Expert(kind_of(memory, match_length, occurrences), {token: 1.0})


@pytest.mark.parametrize("match_length", [1, 2, 3, 4, 5, 8, 40])
def test_a_memory_begins_as_copied_tokens_do(match_length: int) -> None:
    (weight,) = TrustBook().session("t").weights([expert("past", 1, match_length)])
    assert weight == pytest.approx(survival(match_length))


def test_weights_and_none_of_them_add_up_to_one() -> None:
    weights = TrustBook().session("t").weights([expert("past", 1), expert("corpus", 2), expert("dense", 1)])
    assert all(weight > 0 for weight in weights)
    assert sum(weights) < 1


def test_what_one_session_learns_the_next_ones_of_its_tenant_know() -> None:
    book = TrustBook()
    first, both = book.session("a"), [expert("past", 1), expert("corpus", 2)]
    for _ in range(100):
        first.learn(both, 2)
    past, corpus = book.session("a").weights(both)
    assert corpus > 5 * past
    untaught = TrustBook().session("a").weights(both)
    assert book.session("b").weights(both) == untaught, "another tenant's sessions teach nothing"


def test_a_session_that_may_not_be_learnt_from_teaches_itself_alone() -> None:
    book = TrustBook()
    private, both = book.session("a", teaches=False), [expert("past", 1), expert("corpus", 2)]
    untaught = private.weights(both)
    for _ in range(100):
        private.learn(both, 2)
    assert private.weights(both)[1] > untaught[1]
    assert book.session("a").weights(both) == untaught


def test_a_session_learns_of_itself_beyond_what_others_do() -> None:
    book = TrustBook()
    here, elsewhere = book.session("a"), book.session("a")
    long, short = [expert("past", 1, match_length=20)], [expert("past", 1, match_length=2)]
    before = elsewhere.weights(short)
    for _ in range(50):
        here.learn(long, 9)
    assert here.weights(short)[0] < before[0], "lengths that it has not seen, too"
    assert elsewhere.weights(short) == before


def test_weights_follow_how_often_each_memory_is_right() -> None:
    session, both = TrustBook().session("t"), [expert("past", 1), expert("corpus", 2)]
    seen = []
    for token in random.Random(5).choices([1, 2, 3], [0.6, 0.3, 0.1], k=4000):
        session.learn(both, token)
        seen.append(session.weights(both))
    past, corpus = (sum(weights[which] for weights in seen[1000:]) / 3000 for which in (0, 1))
    assert past == pytest.approx(0.6, abs=0.06)
    assert corpus == pytest.approx(0.3, abs=0.06)


def taught(one: Expert, token: int, times: int) -> float:
    session = TrustBook().session("t")
    for _ in range(times):
        session.learn([one], token)
    return session.weights([one])[0]


def test_no_outcome_makes_a_memory_certain_or_impossible() -> None:
    assert 0.99 < taught(expert("past", 1), 1, 5000) < 1
    assert 0 < taught(expert("past", 1), 2, 5000) < 0.01
    assert 0 < taught(Expert(kind_of("past", 3, 1), {}), 1, 10) < 1, "one that knows nothing there"
