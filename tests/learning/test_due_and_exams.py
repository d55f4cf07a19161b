"""When a lesson is due, and what it scores: without any process."""

from collections import Counter

import numpy as np

from outrider.learning.due import MOST_TIMES, DueLessons
from outrider.learning.exams import chosen_exams
from outrider.learning.judge import LEAST_OF_TENANT
from outrider.learning.passages import Passage


def passage(session: int, tenant: str = "ann") -> Passage:
    ids, tops = np.arange(2, dtype=np.uint32), np.zeros((1, 0), np.uint32)
    return Passage(tenant, session, 0, ids, tops, tops.astype(np.float16), np.ones(1, dtype=bool))


def wanted_after(*outcomes: str) -> int:
    due = DueLessons(10)
    for outcome in outcomes:
        due.ended(outcome)
    return due.wanted


def test_wasted_lessons_wait_for_ever_more_text_up_to_a_bound() -> None:
    assert wanted_after() == 10
    assert wanted_after("late") == 20
    assert wanted_after("late", "memory", "killed", "failed", "unloadable") == 320
    assert wanted_after(*["late"] * 99) == 10 * MOST_TIMES


def test_a_lesson_that_the_judge_decided_ends_the_wait_and_one_that_showed_nothing_does_not() -> None:
    assert wanted_after("late", "worse") == wanted_after("late", "better") == 10
    assert wanted_after("late", "too_few", "stopped") == 20
    assert wanted_after("too_few", "stopped", "not_better") == 10


def test_all_passages_are_scored_where_they_are_few() -> None:
    kept = [passage(session % 3) for session in range(20)]
    assert chosen_exams(kept, 20) == kept


def test_the_newest_sessions_are_scored_oldest_first() -> None:
    kept = [passage(session) for session in range(20)]
    assert chosen_exams(kept, 8) == kept[12:]


def test_long_sessions_give_a_second_passage_once_all_have_given_one() -> None:
    kept = [passage(session) for session in range(10)] + [passage(99) for _ in range(50)]
    found = Counter(one.session for one in chosen_exams(kept, 12))
    assert len(found) == 11
    assert found[99] == 2


def test_a_flood_of_one_tenant_leaves_the_others_sessions_in_the_score() -> None:
    kept = [passage(session, f"t{session // 6}") for session in range(30)]
    kept += [passage(100 + session, "mallory") for session in range(200)]
    found = Counter(one.tenant for one in chosen_exams(kept, 24))
    assert found == {"mallory": 4, "t0": 4, "t1": 4, "t2": 4, "t3": 4, "t4": 4}


def test_of_very_many_tenants_the_newest_are_scored_with_enough_sessions_to_show_a_loss() -> None:
    kept = [passage(10 * tenant + turn, f"t{tenant}") for tenant in range(50) for turn in range(6)]
    found = Counter(one.tenant for one in chosen_exams(kept, 5 * LEAST_OF_TENANT))
    assert found == dict.fromkeys(("t45", "t46", "t47", "t48", "t49"), LEAST_OF_TENANT)
