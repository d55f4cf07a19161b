"""What the target said reaches a source that asks for it, through its worker."""

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest

from outrider.source.events import Progress
from outrider.source.followed import FollowedSession, SourceProfile
from outrider.source.worker import AnsweringWorker
from outrider.wire.observed import off_path_to_wire, tops_to_wire
from speculative.errors import InvalidRequest
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.observed import Observed, OffPathRow, TopIds
from tests.source.support.workers import EXAMPLE, PROMPT, follow

TOPS = [TopIds((4, 5), (-0.5, -1.0)), TopIds((6, 7), (-0.5, -1.0))]
OFF_PATH = [OffPathRow(9, 5, 6, (6, 7))]


class Learning(AnsweringWorker[FollowedSession]):
    """Keeps what it hears, and drafts what was likeliest last."""

    def __init__(self, profile: SourceProfile, publish: Any) -> None:
        super().__init__(profile, publish)
        self.heard: list[tuple[int, Observed]] = []

    def open(self, follow: Any, ids: Any, kept: Any) -> FollowedSession:
        return FollowedSession(follow, ids)

    def observed(self, session: FollowedSession, said: Observed) -> None:
        self.heard.append((len(session.ids), said))

    def draft(self, session: FollowedSession) -> Iterable[Fragment]:
        if self.heard:
            yield session.fragment(self.heard[-1][1].tops[-1].ids[:1], (-1,), (0.5,))


def worker(tops: int) -> tuple[Learning, list[Any]]:
    sent: list[Any] = []
    learning = Learning(SourceProfile("learning", "a model", tops=tops), sent.append)
    learning.submit(follow(1))
    return learning, sent


def progress(tops: bytes, off_path: bytes) -> Progress:
    ids = (4, 6)
    return Progress(0, 1, len(PROMPT), ids, prefix_hash([*PROMPT, *ids]), tops, off_path)


def test_it_hears_what_was_said_before_it_drafts() -> None:
    learning, sent = worker(2)
    learning.submit(progress(tops_to_wire(TOPS, 2), off_path_to_wire(OFF_PATH, 2)))
    learning.take_in(wait=False)
    learning.work()
    ((length, said),) = learning.heard
    assert length == len(PROMPT) + 2, "the last tops belong to the session's last ids"
    assert (list(said.tops), list(said.off_path)) == (TOPS, OFF_PATH)
    ((_, fragment),) = sent[-1][0].drafts
    assert fragment.tokens == (6,)


def test_one_that_does_not_ask_is_not_called() -> None:
    learning, _ = worker(0)
    learning.submit(progress(tops_to_wire(TOPS, 2), b""))
    learning.take_in(wait=False)
    assert learning.heard == []
    assert len(learning.roster) == 1


def test_bytes_that_make_no_sense_end_that_session_with_a_reason() -> None:
    learning, sent = worker(2)
    learning.submit(progress(b"123", b""))
    learning.take_in(wait=False)
    ((alias, why),) = sent[-1][0].refusals
    assert alias == 1
    assert "3 bytes of tops" in why
    assert len(learning.roster) == 0


@pytest.mark.parametrize(("owner", "followed"), [("", 1), ("t", 1), ("another", 0)])
def test_a_source_of_one_tenant_follows_no_other_tenants_session(owner: str, followed: int) -> None:
    sent: list[Any] = []
    learning = Learning(SourceProfile("learning", "a model", tenant=owner), sent.append)
    learning.submit(follow(1))
    learning.take_in(wait=False)
    assert len(learning.roster) == followed
    refusals = [why for message in sent for _, why in message[0].refusals]
    assert refusals == ["this source follows only sessions of a tenant other than this session's"] * (
        1 - followed
    )


@pytest.mark.parametrize("tops", [-1, 33])
def test_a_profile_asks_for_a_number_that_verifiers_send(tops: int) -> None:
    with pytest.raises(InvalidRequest, match="0 to 32"):
        SourceProfile("learning", "a model", tops=tops)


def test_the_example_drafts_what_was_likely_after_the_token_before() -> None:
    spec = importlib.util.spec_from_file_location("recycling", EXAMPLE.parent / "recycling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent: list[Any] = []
    recycling = module.Recycling(module.PROFILE, sent.append)
    recycling.submit(follow(1))
    ids = (4, 6)
    tops = [TopIds((4, 8, 9, 2), (-0.5,) * 4), TopIds((6, 7, 9, 2), (-0.5,) * 4)]
    off_path = [OffPathRow(9, 6, 3, (3, 2, 1, 0))]
    recycling.submit(
        Progress(
            0,
            1,
            len(PROMPT),
            ids,
            prefix_hash([*PROMPT, *ids]),
            tops_to_wire(tops, 4),
            off_path_to_wire(off_path, 4),
        )
    )
    recycling.take_in(wait=False)
    recycling.work()
    ((_, fragment),) = sent[-1][0].drafts
    assert fragment.tokens == (3, 2, 1, 0), "what it heard of 6, a token off the path"
    (session,) = recycling.roster
    assert session.following[PROMPT[-1]] == (4, 8, 9, 2)
    assert session.following[4] == (6, 7, 9, 2)
