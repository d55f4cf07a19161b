"""A device's windows continue one another, follow what is committed, and never exceed the credits."""

import random
from dataclasses import replace

import pytest

from outrider.edge.controller import Decision
from outrider.edge.device_session import DeviceSession, Terms
from outrider.edge.latency_model import Mode
from speculative.errors import Unavailable
from speculative.fragment import Fragment
from speculative.hashing import extend, prefix_hash
from speculative.params import SamplingParams
from tests.edge.toy import VOCABULARY, ToyModel, guess, truth

PIPELINED = Decision(Mode.PIPELINED, 4, 3, 100, "a test")
TERMS = Terms(
    ids=(3, 1, 4),
    prompt_length=3,
    seed=7,
    epoch=5,
    params=SamplingParams(temperature=0.0),
    vocabulary_size=VOCABULARY,
    limit=200,
    credits=64,
    credits_per_token=16,
)


def draft(session: DeviceSession, model: ToyModel, steps: int = 100) -> list[Fragment]:
    """Reads with the model while the session asks for it; the windows that came of it."""
    windows = []
    for _ in range(steps):
        while (window := session.take_window()) is not None:
            windows.append(window)
        reading = session.plan()
        if reading is None:
            break
        model.rewind(reading.keep)
        session.drafted(reading, model.forward(reading.ids))
        assert model.ids == session.read
    return windows


def test_windows_continue_one_another_by_base_and_hash() -> None:
    session = DeviceSession(TERMS, PIPELINED)
    windows = draft(session, ToyModel())
    assert [len(window) for window in windows] == [4, 4, 4], "three windows may be on their way"
    ids = list(TERMS.ids)
    for window in windows:
        assert (window.base, window.prefix_hash, window.epoch) == (len(ids), prefix_hash(ids), 5)
        for token in window.tokens:
            assert token == guess(ids)
            ids.append(token)
    assert session.counts.sent == session.counts.drafted == 12


def test_commits_that_agree_let_the_next_window_out_and_nothing_is_read_twice() -> None:
    session, model = DeviceSession(TERMS, PIPELINED), ToyModel()
    first = draft(session, model)
    session.commit(3, first[0].tokens, prefix_hash([*TERMS.ids, *first[0].tokens]))
    (fourth,) = draft(session, model)
    assert fourth.base == 3 + 12
    assert model.reads == 3 + 15, "the prompt and each drafted id once, but for the last, which nobody asked"
    assert (session.counts.equal, session.counts.wrong) == (4, 0)


def test_a_refuted_draft_drops_all_behind_it() -> None:
    session, model = DeviceSession(TERMS, PIPELINED), ToyModel()
    windows = draft(session, model)
    agreed, other = windows[0].tokens[0], (windows[0].tokens[1] + 1) % VOCABULARY
    session.commit(3, (agreed, other))
    assert (session.counts.equal, session.counts.wrong) == (1, 1)
    again = draft(session, model)
    assert again[0].base == 5
    assert again[0].prefix_hash == prefix_hash([*TERMS.ids, agreed, other])
    assert again[0].tokens[0] == guess([*TERMS.ids, agreed, other])


def test_credits_bound_what_is_sent_and_come_with_tokens() -> None:
    session = DeviceSession(replace(TERMS, credits=6, credits_per_token=2), PIPELINED)
    model = ToyModel()
    windows = draft(session, model)
    assert sum(len(window) for window in windows) == 6
    session.commit(3, windows[0].tokens[:1])
    assert sum(len(window) for window in draft(session, model)) == 2


def test_nothing_is_drafted_behind_the_end() -> None:
    first = guess(TERMS.ids)
    ended = DeviceSession(replace(TERMS, end_ids=frozenset({first})), PIPELINED)
    assert [window.tokens for window in draft(ended, ToyModel())] == [(first,)]
    short = DeviceSession(replace(TERMS, limit=6), PIPELINED)
    assert sum(len(window) for window in draft(short, ToyModel())) == 2, "the last token is the target's own"


def test_cloud_only_drafts_a_little_and_sends_nothing() -> None:
    session = DeviceSession(TERMS, Decision(Mode.CLOUD, 4, 0, 0, "a test"))
    assert draft(session, ToyModel()) == []
    assert session.counts.drafted == 4
    session.decide(Decision(Mode.CLOUD, 0, 0, 0, "off"))
    assert session.plan() is None


def test_a_new_epoch_has_everything_sent_again() -> None:
    session, model = DeviceSession(TERMS, PIPELINED), ToyModel()
    before = draft(session, model)
    session.commit(3, before[0].tokens[:1], epoch=9)
    again = draft(session, model)
    assert {window.epoch for window in again} == {9}
    assert [token for window in again for token in window.tokens][:11] == [
        token for window in before for token in window.tokens
    ][1:]


def test_a_gap_or_another_hash_is_an_error() -> None:
    session = DeviceSession(TERMS, PIPELINED)
    with pytest.raises(Unavailable, match="position 4, but 3 is next"):
        session.commit(4, (1,))
    with pytest.raises(Unavailable, match="the hash over 4 ids"):
        session.commit(3, (1,), prefix_hash=12345)


def test_a_model_that_failed_is_read_to_from_the_beginning() -> None:
    session, model = DeviceSession(TERMS, PIPELINED), ToyModel()
    draft(session, model, steps=2)
    session.failed()
    model.rewind(0)
    reading = session.plan()
    assert reading is not None
    assert reading.keep == 0
    assert reading.ids[:3] == TERMS.ids


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_committed_when_the_windows_hold_together(seed: int) -> None:
    rng = random.Random(seed)
    mode = rng.choice([Mode.HINTING, Mode.WAITING, Mode.PIPELINED])
    decision = Decision(mode, rng.randint(1, 8), rng.randint(1, 4), 0, "a test")
    session, model = DeviceSession(replace(TERMS, credits=12, credits_per_token=3), decision), ToyModel()
    ids, credits, sent = list(TERMS.ids), 12, 0
    known = {prefix_hash(ids): len(ids)}
    while len(ids) < 120:
        for window in draft(session, model, steps=rng.randint(0, 9)):
            assert known[window.prefix_hash] == window.base
            hashed = window.prefix_hash
            for at, token in enumerate(window.tokens):
                hashed = extend(hashed, token)
                known[hashed] = window.base + at + 1
            sent += len(window)
            assert sent <= credits
        count = rng.randint(1, 5)
        committed: list[int] = []
        for _ in range(count):
            committed.append(truth([*ids, *committed]))
        session.commit(len(ids), committed, prefix_hash([*ids, *committed]))
        ids += committed
        credits += 3 * count
        known[prefix_hash(ids)] = len(ids)
    assert session.counts.equal > session.counts.wrong > 0
