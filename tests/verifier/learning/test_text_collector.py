"""What a learning head keeps of sessions: the answers' tokens with what comes before, once, and by exam."""

from typing import Any

import pytest

from outrider.learning.cuts import CONTEXT, PLACES, is_exam, session_number
from outrider.learning.owner import LearnOwner
from outrider.learning.passages import PassageBuffer
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from verifier_service.learning.collector import TextCollector
from verifier_service.sessions.request import SessionRequest
from verifier_service.sessions.table import SessionView

LESSON = next(name for name in map(str, range(99)) if not is_exam(session_number("ann", name)))
EXAM = next(name for name in map(str, range(99)) if is_exam(session_number("ann", name)))


@pytest.fixture
def buffer() -> PassageBuffer:
    return PassageBuffer(1 << 20)


@pytest.fixture
def collector(buffer: PassageBuffer) -> TextCollector:
    return TextCollector(LearnOwner.of("tenant:ann"), buffer)


def view_of(ids: range, prompt_length: int, name: str = LESSON, **given: Any) -> SessionView:
    tenant, learn = given.pop("tenant", "ann"), given.pop("learn", True)
    params = SamplingParams(temperature=0.0)
    request = SessionRequest(
        SessionKey(tenant, name),
        1,
        tuple(ids),
        prompt_length,
        1000,
        params,
        0,
        (),
        None,
        4,
        (),
        learn=learn,
        **given,
    )
    return SessionView(1, request, (), {}, None)


def commit(view: SessionView, ids: range, token_sources: bytes) -> None:
    view.ids.extend(ids)
    view.token_sources.extend(token_sources)


def test_answers_become_passages_with_the_ids_before_them_and_what_was_not_drafted(
    collector: TextCollector, buffer: PassageBuffer
) -> None:
    view = view_of(range(CONTEXT + 10), CONTEXT + 10)
    commit(view, range(700, 704), bytes([0, 1, 2, 0]))
    collector.stopped(view)
    ((found,), exams) = buffer.take_fresh()
    assert exams == []
    assert (found.tenant, found.start, len(found.ids), found.places) == ("ann", 10, CONTEXT + 4, 4)
    assert found.ids[-5:].tolist() == [CONTEXT + 9, 700, 701, 702, 703]
    assert found.wrong.tolist() == [True, False, False, True]
    assert buffer.fresh == 0, "taken"
    assert found.top_ids.shape == (4, 0)


def test_a_long_answer_is_cut_and_none_of_its_tokens_is_lost_or_doubled(
    collector: TextCollector, buffer: PassageBuffer
) -> None:
    view = view_of(range(3), 3)
    commit(view, range(100, 100 + 2 * PLACES + 5), bytes(2 * PLACES + 5))
    collector.stopped(view)
    lessons, _ = buffer.take_fresh()
    assert [one.places for one in lessons] == [PLACES, PLACES, 5]
    places = [id_ for one in lessons for id_ in one.ids[-one.places :].tolist()]
    assert places == view.ids[3:]
    assert [one.ids[0] for one in lessons] == [view.ids[one.start] for one in lessons]


def test_a_session_that_was_parked_and_goes_on_is_collected_once(
    collector: TextCollector, buffer: PassageBuffer
) -> None:
    view = view_of(range(3), 3)
    commit(view, range(10, 14), bytes(4))
    collector.stopped(view)
    commit(view, range(20, 22), bytes(2))
    collector.stopped(view)
    collector.stopped(view)
    lessons, _ = buffer.take_fresh()
    assert [one.ids[-one.places :].tolist() for one in lessons] == [[10, 11, 12, 13], [20, 21]]


def test_tokens_that_another_verifier_committed_are_context_alone(
    collector: TextCollector, buffer: PassageBuffer
) -> None:
    view = view_of(range(9), 3, recovered=True)
    commit(view, range(20, 22), bytes(2))
    collector.stopped(view)
    ((found,), _) = buffer.take_fresh()
    assert (found.places, len(found.ids)) == (2, 11)


def test_the_tokens_of_a_scored_prompt_are_no_places(collector: TextCollector, buffer: PassageBuffer) -> None:
    view = view_of(range(9), 9, score_from=4)
    commit(view, range(4, 9), bytes(5))
    commit(view, range(20, 22), bytes(2))
    collector.stopped(view)
    ((found,), _) = buffer.take_fresh()
    assert found.ids[-found.places :].tolist() == [20, 21]


def test_a_session_for_scoring_is_never_learnt_from(collector: TextCollector, buffer: PassageBuffer) -> None:
    view = view_of(range(3), 3, EXAM)
    commit(view, range(10, 14), bytes(4))
    collector.stopped(view)
    lessons, exams = buffer.take_fresh()
    assert (len(lessons), len(exams)) == (0, 1)


@pytest.mark.parametrize("given", [{"tenant": "bob"}, {"learn": False}, {"tenant": ""}])
def test_text_that_the_owner_may_not_keep_is_not_kept(
    given: dict[str, Any], collector: TextCollector, buffer: PassageBuffer
) -> None:
    view = view_of(range(3), 3, **given)
    commit(view, range(10, 14), bytes(4))
    collector.stopped(view)
    assert buffer.nbytes == 0
