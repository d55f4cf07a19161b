"""What a learning drafter keeps, which weights it believes in, and when it computes: without any process."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drafter_service.learning.collector import Collector
from outrider.learning.cuts import CONTEXT, PLACES
from outrider.learning.judge import LessonVerdict, Score, judge
from outrider.learning.owner import LearnOwner
from outrider.learning.pace import CALM_S, LessonPace, Surroundings
from outrider.learning.passages import Passage, PassageBuffer, from_bytes, to_bytes
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, FollowedSession, SourceProfile
from outrider.wire.codec import SessionKey
from speculative.errors import InvalidRequest
from speculative.hashing import prefix_hash
from speculative.observed import TopIds
from tests.drafter.support.fake_drafter import make_request

PROFILE = SourceProfile("drafter", "a model")


def followed(
    tenant: str = "ann", learn: bool = True, ids: Sequence[int] = (1, 2, 3), name: str = "s"
) -> FollowedSession:
    request = make_request(ids, learn=learn, vocabulary_size=1000)
    return FollowedSession(
        Follow(0, 1, SessionKey(tenant, name), request), FollowedIds(request.ids, 1000, PROFILE)
    )


def commit(collector: Collector, session: FollowedSession, ids: Sequence[int], drafted: int = 0) -> None:
    session.ids.extend(len(session.ids), ids, prefix_hash([*session.ids.array, *ids]))
    tops = [TopIds((token, token + 1), (-0.5, -1.5)) for token in ids]
    collector.committed(session, tops, len(ids), drafted)


def passage(tenant: str = "ann", session: int = 1, first: int = 0, wrong: bool = True) -> Passage:
    ids = np.arange(first, first + 20, dtype=np.uint32)
    tops = np.stack([ids[4:], ids[4:] + 1], axis=1)
    logprobs = np.full(tops.shape, -1.0, dtype=np.float16)
    return Passage(tenant, session, first, ids, tops, logprobs, np.full(16, wrong))


@pytest.mark.parametrize(
    ("learn", "teachers", "tenant", "allowed", "kept"),
    [
        ("tenant:ann", (), "ann", True, True),
        ("tenant:ann", (), "ann", False, False),
        ("tenant:ann", (), "bob", True, False),
        ("tenant:public", (), "ann", True, False),
        ("public", ("ann",), "ann", True, True),
        ("public", ("ann",), "ann", False, False),
        ("public", ("ann",), "bob", True, False),
        ("public", ("*",), "bob", True, True),
        ("public", ("*",), "bob", False, False),
    ],
)
def test_text_is_kept_only_for_the_owner_and_only_where_the_request_allows_it(
    learn: str, teachers: Sequence[str], tenant: str, allowed: bool, kept: bool
) -> None:
    owner = LearnOwner.of(learn, teachers)
    buffer = PassageBuffer(1 << 20)
    collector = Collector(owner, buffer, 2)
    session = followed(tenant, allowed)
    commit(collector, session, [4, 5])
    collector.ended(session)
    assert owner.label == learn
    assert (buffer.nbytes > 0) == kept


@pytest.mark.parametrize(
    ("learn", "teachers"), [("public", ()), ("tenant:ann", ("bob",)), ("ann", ()), ("tenant:", ()), ("", ())]
)
def test_an_owner_that_is_not_clear_is_refused(learn: str, teachers: Sequence[str]) -> None:
    with pytest.raises(InvalidRequest, match="learn"):
        LearnOwner.of(learn, teachers)


def test_places_become_passages_with_the_ids_before_them_and_what_was_foreseen() -> None:
    buffer = PassageBuffer(1 << 20)
    collector = Collector(LearnOwner.of("tenant:ann"), buffer, 2)
    session = followed(ids=range(CONTEXT + 10))
    commit(collector, session, [700, 701, 702], drafted=2)
    commit(collector, session, [703], drafted=0)
    collector.ended(session)
    ((found,), _) = buffer.take_fresh()
    assert (found.start, len(found.ids), found.places) == (10, CONTEXT + 4, 4)
    assert found.ids[-5:].tolist() == [CONTEXT + 9, 700, 701, 702, 703]
    assert found.top_ids[:, 0].tolist() == [700, 701, 702, 703]
    assert found.wrong.tolist() == [False, False, True, True]


def test_a_passage_ends_where_the_target_said_nothing_and_where_it_is_long() -> None:
    buffer = PassageBuffer(1 << 20)
    collector = Collector(LearnOwner.of("tenant:ann"), buffer, 2)
    session = followed()
    commit(collector, session, [4, 5])
    session.ids.extend(5, [6], prefix_hash([*session.ids.array, 6]))
    collector.committed(session, (), 1, 0)
    commit(collector, session, list(range(100, 100 + PLACES + 1)))
    collector.ended(session)
    lessons, exams = buffer.take_fresh()
    assert [one.places for one in lessons] == [2, PLACES, 1]
    assert exams == []
    for one in lessons:
        assert one.top_ids[:, 0].tolist() == one.ids[-one.places :].tolist()


def test_tops_of_another_width_or_of_nothing_new_are_left_out() -> None:
    buffer = PassageBuffer(1 << 20)
    collector = Collector(LearnOwner.of("tenant:ann"), buffer, 3)
    session = followed()
    commit(collector, session, [4, 5])
    collector.committed(session, [TopIds((1, 2, 3), (-1.0,) * 3)], 0, 0)
    collector.ended(session)
    assert buffer.nbytes == 0


def test_some_sessions_are_for_scoring_and_never_for_learning_even_when_they_are_followed_anew() -> None:
    buffer = PassageBuffer(1 << 20)
    collector = Collector(LearnOwner.of("tenant:ann"), buffer, 2)
    for turn in range(2):
        for index in range(80):
            session = followed(name=f"s{index}")
            commit(collector, session, [10 * index + 4 + turn, 10 * index + 5])
            collector.ended(session)
    lessons, exams = buffer.take_fresh()
    taught, scored_with = {one.session for one in lessons}, {one.session for one in exams}
    assert not taught & scored_with
    assert len(taught | scored_with) == 80
    assert 10 <= len(scored_with) <= 30


def test_the_buffer_is_bounded_and_a_flood_crowds_nobody_out() -> None:
    size = passage().nbytes
    buffer = PassageBuffer(16 * size)
    for session in range(4):
        buffer.add(passage("ann", session), exam=False)
        buffer.add(passage("ann", session), exam=True)
    for session in range(1000):
        buffer.add(passage("mallory", 10 + session), exam=False)
        buffer.add(passage("mallory", 10 + session), exam=True)
        assert buffer.nbytes <= 16 * size
    lessons, exams = buffer.take_fresh()
    assert [one.session for one in lessons if one.tenant == "ann"] == [0, 1, 2, 3]
    assert [one.tenant for one in exams].count("ann") == 2, "half of the room for scoring"
    assert max(one.session for one in lessons) == 1009, "the newest stay"


def test_a_passage_without_a_wrong_place_is_kept_for_scoring_alone() -> None:
    buffer = PassageBuffer(1 << 20)
    buffer.add(passage(wrong=False), exam=False)
    assert buffer.nbytes == 0
    buffer.add(passage(wrong=False), exam=True)
    buffer.add(passage(), exam=False)
    assert buffer.fresh == 16
    lessons, exams = buffer.take_fresh()
    assert (len(lessons), len(exams), buffer.fresh) == (1, 1, 0)


def test_a_passage_larger_than_the_buffer_is_not_kept() -> None:
    buffer = PassageBuffer(passage().nbytes)
    buffer.add(passage(), exam=False)
    assert buffer.nbytes == 0


def test_passages_go_through_a_pipe_without_their_tenants() -> None:
    sent = [passage("ann", 3, first=5), passage("bob", 4)]
    data = to_bytes(sent)
    assert b"ann" not in data
    for one, read in zip(sent, from_bytes(data), strict=True):
        assert (read.tenant, read.session, read.start) == ("", one.session, one.start)
        for name in ("ids", "top_ids", "top_logprobs", "wrong"):
            assert getattr(read, name).dtype == getattr(one, name).dtype
            assert getattr(read, name).tolist() == getattr(one, name).tolist()


def scored(tenants: Sequence[str] | None = None, **accepted: Sequence[int]) -> Score:
    """Passages of 10 places, each of a session of its own; versions are named v0, v1, …"""
    count = len(next(iter(accepted.values())))
    return Score(
        {int(name[1:]): np.array(places) for name, places in accepted.items()},
        np.full(count, 10),
        np.arange(count),
        tenants or ["ann"] * count,
    )


MIXED = [5, 6, 4, 5, 7, 5, 6, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ([1, 2, 1, 2, 1, 2, 1, 2, 1, 2], (1, "better")),
        ([-1, -2, -1, -2, -1, -2, -1, -2, -1, -2], (0, "worse")),
        ([3, -3, 2, -2, 1, -1, 3, -3, 0, 1], (0, "not_better")),
        ([0] * 10, (0, "not_better")),
        ([5, 0, 0, 0, 0, 0, 0, 0, 0, 0], (0, "not_better")),
    ],
)
def test_new_weights_serve_only_where_they_are_surely_better(
    changes: list[int], verdict: tuple[int, str]
) -> None:
    after = [before + change for before, change in zip(MIXED, changes, strict=True)]
    found = judge(scored(v0=MIXED, v1=after), 0, 1, [])
    assert (found.version, found.reason) == verdict


def test_too_few_sessions_decide_nothing() -> None:
    found = judge(scored(v0=[1] * 7, v1=[9] * 7), 0, 1, [])
    assert (found.version, found.reason) == (0, "too_few")
    many_passages = Score(
        {0: np.full(100, 1), 1: np.full(100, 9)}, np.full(100, 10), np.arange(100) % 7, ["ann"] * 100
    )
    assert judge(many_passages, 0, 1, []).reason == "too_few"


def test_weights_that_traffic_turned_against_go_back_to_the_best_earlier_ones() -> None:
    better, best = [place + 1 for place in MIXED], [place + 2 for place in MIXED]
    score = scored(v0=better, v1=best, v2=MIXED, v3=[10] * 10)
    found = judge(score, 2, 3, [0, 1])
    assert (found.version, found.reason) == (1, "earlier_better")
    assert judge(scored(v0=MIXED, v1=better, v2=best), 1, 2, [0]) == LessonVerdict(
        2, "better", found.difference.__class__(0.1, 0.1, 0.1, 10)
    )


def test_one_tenants_gain_may_not_be_anothers_loss() -> None:
    tenants = ["mallory"] * 30 + ["ann"] * 6
    before = [5] * 36
    after = [9] * 30 + [4, 3, 4, 3, 4, 3]
    found = judge(scored(tenants, v0=before, v1=after), 0, 1, [])
    assert (found.version, found.reason) == (0, "harms_tenant")
    assert judge(scored(tenants, v0=before, v1=[9] * 30 + [5] * 6), 0, 1, []).reason == "better"


def test_of_many_tenants_one_may_seem_to_lose_by_chance() -> None:
    chance = np.random.default_rng(3)
    refused = 0
    for _ in range(100):
        tenants = [f"t{index}" for index in range(40) for _ in range(4)]
        gained = chance.integers(-3, 5, size=160)
        found = judge(scored(tenants, v0=[5] * 160, v1=(5 + gained).tolist()), 0, 1, [])
        refused += found.reason == "harms_tenant"
    assert refused <= 10


def looks(pace: LessonPace, seconds: int, **around: Any) -> float:
    """Seconds for which the child ran."""
    given = {"sessions": 0, "idle_cores": 2.0} | around
    start = getattr(looks, "now", 0.0)
    ran = [pace.look(start + index / 10, Surroundings(**given)) for index in range(seconds * 10)]
    looks.now = start + seconds  # type: ignore[attr-defined]
    return sum(ran) / 10


@pytest.mark.parametrize("duty", [0.1, 0.25, 0.5, 1.0])
def test_a_lesson_takes_its_share_of_the_time(duty: float) -> None:
    assert looks(LessonPace(duty, 1), 200) == pytest.approx(200 * duty, abs=2)


def test_a_lesson_rests_while_sessions_run_and_cores_are_short() -> None:
    pace = LessonPace(1.0, 1)
    assert looks(pace, 5, sessions=3, idle_cores=1.5) == 5
    assert looks(pace, 5, sessions=3, idle_cores=0.5) == 0
    assert looks(pace, 5, sessions=3, idle_cores=1.5) == pytest.approx(5 - CALM_S, abs=0.2)
    assert looks(pace, 5, sessions=0, idle_cores=0.0) == 5


def test_the_time_between_two_lessons_is_rest() -> None:
    pace = LessonPace(0.5, 1)
    assert pace.look(0.0, Surroundings(0, 2.0))
    pace.ended(1.9)
    assert not pace.look(2.0, Surroundings(0, 2.0)), "a debt of 0.95 s, less 0.05 s of rest"
    assert not pace.runs
    assert pace.look(10.0, Surroundings(0, 2.0))
