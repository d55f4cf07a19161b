"""What every source's worker does with follows, progress and ends: the same for all of them."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from outrider.source.events import MalformedFollow, Progress, SessionEnded, StreamClosed
from outrider.wire.codec import SessionKey
from speculative.errors import Unavailable
from speculative.hashing import prefix_hash
from tests.source.support.workers import GRACE_S, MAX_LENGTH, PROMPT, WORKERS, Driven, follow, progress


@pytest.fixture(params=sorted(WORKERS))
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def driven(source: str) -> Driven:
    return Driven(source)


def bases(drafts: list[Any]) -> set[tuple[int, int]]:
    """(length, hash) of the base of the first drafts of each pass."""
    first = min(fragment.base for _, _, fragment in drafts)
    return {(first, fragment.prefix_hash) for _, _, fragment in drafts if fragment.base == first}


def test_a_draft_says_which_ids_it_follows(driven: Driven) -> None:
    sent = driven(follow(1))
    assert bases(sent) == {(len(PROMPT), prefix_hash(PROMPT))}
    assert {(stream, alias, fragment.source, fragment.epoch) for stream, alias, fragment in sent} == {
        (0, 1, 1, 7)
    }
    assert driven.worker.counts.nodes_drafted == sum(len(fragment) for _, _, fragment in sent)


def test_drafts_follow_what_was_committed(driven: Driven) -> None:
    driven(follow(1))
    sent = driven(progress(1, PROMPT, [3, 1, 4]))
    ids = (*PROMPT, 3, 1, 4)
    assert bases(sent) >= {(len(ids), prefix_hash(ids))}


def test_ids_that_are_known_already_are_skipped(driven: Driven) -> None:
    driven(follow(1))
    assert driven(Progress(0, 1, 2, PROMPT[2:], prefix_hash(PROMPT))) == []
    driven(progress(1, PROMPT[:-1], [PROMPT[-1], 3]))
    session = driven.worker.roster.get(0, 1)
    assert session is not None
    assert session.ids.array.tolist() == [*PROMPT, 3]
    assert driven.refused == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Progress(0, 1, len(PROMPT), (3,), 12345), "the hash over 9 ids is .* here and 0x0000000000003039"),
        (Progress(0, 1, 0, PROMPT[:1], 12345), "the hash over 1 ids is"),
        (Progress(0, 1, len(PROMPT) + 1, (3,), 0), "ids 8 to 8 are missing; follow the session again"),
        (progress(1, PROMPT, [24]), "id 24 is outside this source's vocabulary of 24"),
        (progress(1, PROMPT, [1] * MAX_LENGTH), "the session has 48 ids; this source can follow 40"),
    ],
)
def test_progress_that_does_not_fit_ends_the_following_and_nothing_else(
    driven: Driven, wrong: Progress, why: str
) -> None:
    driven(follow(1), follow(2))
    assert driven(wrong) == []
    ((stream, alias, message),) = driven.refused
    assert (stream, alias) == (0, 1)
    assert re.search(why, message)
    assert driven(progress(2, PROMPT, [3]))
    assert driven.refused == []


def test_after_a_wrong_hash_the_session_is_followed_again_from_what_was_right(driven: Driven) -> None:
    driven(follow(1))
    driven(Progress(0, 1, len(PROMPT), (3,), 12345))
    (kept,) = driven.worker.roster.kept
    assert kept.ids.array.tolist() == list(PROMPT), "the ids that came with a wrong hash are not among them"
    sent = driven(follow(2, (*PROMPT, 3), session="s1"))
    assert bases(sent) == {(len(PROMPT) + 1, prefix_hash((*PROMPT, 3)))}
    assert driven.refused == []


def test_a_later_epoch_takes_the_session_over(driven: Driven) -> None:
    driven(follow(1))
    sent = driven(follow(2, stream=1, session="s1", epoch=8))
    assert {(stream, alias) for stream, alias, _ in sent} == {(1, 2)}
    assert driven.refused == [(0, 1, "session t/s1#0 is followed by someone else since")]
    assert driven(progress(1, PROMPT, [3])) == []
    assert driven.worker.counts.unknown_aliases == 1


def test_an_older_epoch_is_refused_and_what_was_followed_goes_on(driven: Driven) -> None:
    driven(follow(1, epoch=8))
    assert driven(follow(2, stream=1, session="s1", epoch=7)) == []
    ((stream, alias, message),) = driven.refused
    assert (stream, alias) == (1, 2)
    assert "epoch 0000000000000007 of session t/s1#0 is older than 0000000000000008" in message
    assert driven(progress(1, PROMPT, [3]))


def test_the_same_follow_twice_starts_afresh(driven: Driven) -> None:
    sent = driven(follow(1))
    assert driven(follow(1)) == sent
    assert driven.refused == []
    assert (len(driven.worker.roster), len(driven.worker.roster.kept)) == (1, 0)


def test_an_alias_that_is_used_again_is_the_new_sessions(driven: Driven) -> None:
    driven(follow(1))
    ids = (*PROMPT, 3)
    assert bases(driven(follow(1, ids, session="other"))) == {(len(ids), prefix_hash(ids))}
    assert driven.refused == []
    assert [session.key.session for session in driven.worker.roster] == ["other"]
    assert [session.key.session for session in driven.worker.roster.kept] == ["s1"]


def test_a_broken_stream_keeps_its_sessions_for_the_grace_period(driven: Driven) -> None:
    driven(follow(1), follow(2, stream=1))
    driven(StreamClosed(0))
    roster = driven.worker.roster
    assert ([s.alias for s in roster], [s.alias for s in roster.kept]) == ([2], [1])
    driven.now = GRACE_S - 0.1
    driven()
    assert len(roster.kept) == 1
    driven.now = GRACE_S
    driven()
    assert roster.kept == []
    assert driven(progress(2, PROMPT, [3], stream=1))


def test_a_session_that_is_over_is_closed_once(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = driven.worker.roster._close
    monkeypatch.setattr(
        driven.worker.roster, "_close", lambda session: (closed.append(session.key.session), close(session))
    )
    driven(follow(1), follow(2), follow(3))
    driven(SessionEnded(0, 1), StreamClosed(0), follow(2))
    assert closed == ["s1"], "the second is followed again, the third is kept"
    driven.worker.shut_down()
    assert sorted(closed) == ["s1", "s2", "s3"]


def test_as_many_sessions_are_followed_and_kept_as_the_profile_says(source: str) -> None:
    driven = Driven(source, max_sessions=2)
    driven(follow(1), follow(2), follow(3))
    assert driven.refused == [(0, 3, "this source follows 2 sessions already; that is its limit")]
    driven(StreamClosed(0), follow(3, stream=1), follow(4, stream=1), StreamClosed(1))
    assert [session.alias for session in driven.worker.roster.kept] == [3, 4]


@pytest.mark.parametrize(
    ("ids", "vocabulary", "why"),
    [
        ([24], 100, "id 24 is outside this source's vocabulary of 24"),
        ([1, 7], 6, "id 7 is outside the target's vocabulary of 6"),
        ([1] * (MAX_LENGTH + 1), 24, "the session has 41 ids; this source can follow 40"),
    ],
)
def test_a_session_that_cannot_be_read_is_refused_and_its_earlier_self_goes_on(
    driven: Driven, ids: list[int], vocabulary: int, why: str
) -> None:
    driven(follow(1))
    assert driven(follow(2, ids, session="s1", epoch=8, vocabulary_size=vocabulary)) == []
    assert driven.refused == [(0, 2, why)]
    assert driven(progress(1, PROMPT, [3]))


def test_a_malformed_follow_is_refused_and_unknown_aliases_are_counted(driven: Driven) -> None:
    driven(
        follow(1),
        MalformedFollow(0, 9, "no"),
        SessionEnded(0, 2),
        SessionEnded(1, 1),
        Progress(0, 8, 0, (), 0),
    )
    assert driven.refused == [(0, 9, "no")]
    assert driven.worker.counts.unknown_aliases == 3
    assert len(driven.worker.roster) == 1


def test_another_tenants_session_of_the_same_name_is_another_one(driven: Driven) -> None:
    one = follow(1, session="s")
    other = type(one)(0, 2, SessionKey("u", "s"), one.request)
    driven(one, other)
    assert driven.refused == []
    assert len(driven.worker.roster) == 2


def test_nothing_is_drafted_for_sessions_that_want_nothing(driven: Driven) -> None:
    assert driven(follow(1, node_limit=0), follow(2, limit=len(PROMPT) + 1)) == []
    assert driven.refused == []


@pytest.mark.parametrize("where", ["open", "opened", "progressed"])
def test_a_session_that_fails_by_itself_is_refused_and_the_others_go_on(
    driven: Driven, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driven(follow(2))
    real: Callable[..., Any] = getattr(driven.worker, where)

    def fail(concerned: Any, *rest: Any) -> Any:
        if concerned.alias == 1:
            raise IndexError("index 7 is out of bounds")
        return real(concerned, *rest)

    monkeypatch.setattr(driven.worker, where, fail)
    driven(follow(1), progress(1, PROMPT, [3]))
    assert driven.refused == [(0, 1, driven.worker.failure)]
    assert "index 7 is out of bounds" in caplog.text
    assert driven.worker.counts.failed_sessions == driven.worker.counts.refusals == 1
    assert driven.worker.roster.get(0, 1) is None
    assert driven(progress(2, PROMPT, [3]))


def test_what_goes_out_on_a_stream_that_broke_is_dropped(driven: Driven) -> None:
    driven(MalformedFollow(0, 9, "no"), StreamClosed(0))
    assert driven.refused == []


def test_a_call_runs_in_the_workers_thread_and_gives_its_result_or_error(driven: Driven) -> None:
    fine, wrong = driven.worker.call(lambda: 5), driven.worker.call(lambda: 1 // 0)
    gone = driven.worker.call(lambda: pytest.fail("nobody waits for it"))
    assert gone.cancel()
    driven()
    assert fine.result(0) == 5
    assert isinstance(wrong.exception(0), ZeroDivisionError)


def test_a_call_that_its_thread_no_longer_runs_is_refused_at_once(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, calls = driven.worker, list[Future[int]]()

    def call() -> None:
        calls.append(worker.call(lambda: 5))

    monkeypatch.setattr(worker, "shut_down", call)  # when the thread has taken in its last event
    worker.stop()
    worker.run()
    call()
    for refused in calls:
        with pytest.raises(Unavailable, match="the source has stopped"):
            refused.result(0)
    assert len(calls) == 2


@pytest.fixture
def running(driven: Driven) -> Iterator[Driven]:
    """A worker in its own thread."""
    thread = threading.Thread(target=driven.worker.run, daemon=True)
    thread.start()
    yield driven
    driven.worker.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_its_thread_sleeps_until_something_comes_and_closes_everything_in_the_end(running: Driven) -> None:
    worker = running.worker
    worker.submit(follow(1))
    assert worker.call(lambda: len(worker.roster)).result(60) == 1
    worker.submit(StreamClosed(0))
    assert worker.call(lambda: len(worker.roster.kept)).result(60) == 1
    running.now = GRACE_S
    assert worker.call(lambda: None).result(60) is None
    assert worker.call(lambda: len(worker.roster.kept)).result(60) == 0
    assert worker.gauges()["sessions"] == 0
