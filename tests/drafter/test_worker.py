"""The drafter's worker: passes, fragments and caches. Driven step by step, without its thread."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from drafter_service.draft_tree import Growth
from drafter_service.worker import DrafterWorker
from outrider.source.events import (
    DecodingRequest,
    Follow,
    LeastSurvival,
    Outgoing,
    Progress,
    SessionEnded,
    StreamClosed,
)
from outrider.source.followed import SourceProfile
from outrider.wire.codec import SessionKey
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.policies.names import POLICIES

PROMPT = (3, 1, 4, 1, 5)
GROWTH = Growth(children=2, scale=1.0, floor=0.05, depth=3)


class Bench:
    """A worker over a fake drafter, what it sent, and a clock."""

    def __init__(self, drafter: Any, request_for: Callable[..., DecodingRequest], **settings: Any) -> None:
        abilities = drafter.abilities
        profile = SourceProfile(
            "drafter",
            drafter.model,
            readable_ids=abilities.width,
            max_length=abilities.max_length,
            max_sessions=settings.pop("max_sessions", 8),
            noun="drafter",
        )
        values = {"nodes_per_pass": 2, "chunk": 100} | settings
        self.now = 0.0
        self.sent: list[tuple[int, int, Fragment]] = []
        self.refused: list[tuple[int, int, str]] = []
        self.request_for = request_for
        self.drafter = drafter
        self.worker = DrafterWorker(
            drafter, profile, self._take, growth=GROWTH, clock=lambda: self.now, **values
        )

    def _take(self, outgoing: dict[int, Outgoing]) -> None:
        for stream, what in outgoing.items():
            self.sent += [(stream, alias, fragment) for alias, fragment in what.drafts]
            self.refused += [(stream, alias, message) for alias, message in what.refusals]

    def take(self, *events: Any) -> None:
        for event in events:
            self.worker.submit(event)
        self.worker.take_in(wait=False)

    def follow(
        self, alias: int, ids: Sequence[int] = PROMPT, *, stream: int = 0, session: str = "", **given: Any
    ) -> None:
        key = SessionKey("t", session or f"s{alias}")
        self.take(Follow(stream, alias, key, self.request_for(ids, **given)))

    def progress(self, alias: int, before: Sequence[int], ids: Sequence[int], *, stream: int = 0) -> None:
        self.take(Progress(stream, alias, len(before), tuple(ids), prefix_hash([*before, *ids])))

    def settle(self) -> int:
        """Runs passes until nothing is left to draft; returns their number."""
        passes = 0
        while self.worker.work():
            passes += 1
        return passes


@pytest.fixture
def bench(fake: Any, request_for: Callable[..., DecodingRequest]) -> Bench:
    return Bench(fake, request_for)


@pytest.fixture
def bench_of(fake_drafter: Any, request_for: Callable[..., DecodingRequest]) -> Callable[..., Bench]:
    """Makes a bench with other sizes; `room` and `max_length` are the drafter's."""

    def make(room: int = 1 << 20, max_length: int = 200, **settings: Any) -> Bench:
        return Bench(fake_drafter(room=room, max_length=max_length), request_for, **settings)

    return make


def test_drafts_go_out_after_every_pass(bench: Bench) -> None:
    bench.follow(1)
    assert bench.sent == []
    bench.worker.work()
    (stream, alias, fragment) = bench.sent[0]
    assert (stream, alias, fragment.base) == (0, 1, len(PROMPT))
    assert fragment.tokens[0] == int(bench.drafter.logits(PROMPT).argmax())
    sent = len(bench.sent)
    bench.worker.work()
    assert len(bench.sent) > sent


def test_a_stream_that_needs_sure_nodes_is_sent_no_others_until_it_needs_less(bench: Bench) -> None:
    bench.take(LeastSurvival(0, 0.999))
    bench.follow(1)
    bench.follow(2, (*PROMPT, 2), stream=1)
    bench.settle()
    assert {stream for stream, _, _ in bench.sent} == {1}
    for needed in (0.2, 0.0):
        bench.sent.clear()
        bench.take(LeastSurvival(0, needed))
        bench.settle()
        sent = [survival for _, alias, fragment in bench.sent if alias == 1 for survival in fragment.survival]
        assert sent
        assert min(sent) >= needed


def test_all_sessions_share_every_pass(bench: Bench) -> None:
    for alias in range(4):
        bench.follow(alias, (*PROMPT, alias))
    bench.worker.work()
    bench.worker.work()
    assert bench.drafter.passes == [4 * (len(PROMPT) + 1), 4]
    assert {alias for _, alias, _ in bench.sent} == {0, 1, 2, 3}


def test_one_session_alone_has_all_nodes_of_a_pass(bench: Bench) -> None:
    bench.follow(1)
    bench.worker.work()
    bench.worker.work()
    assert bench.drafter.passes == [len(PROMPT), 2]


def test_a_long_prompt_is_read_in_chunks_while_others_go_on(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(chunk=10)
    bench.follow(1)
    bench.worker.work()
    bench.follow(2, [1] * 35)
    bench.sent.clear()
    for _ in range(3):
        bench.worker.work()
    assert bench.drafter.passes[1:] == [2 + 10, 1 + 10, 1 + 10], "nodes of the one, ids of the other"
    assert {alias for _, alias, _ in bench.sent} == {1}
    bench.worker.work()
    assert {alias for _, alias, _ in bench.sent} == {1, 2}


def test_a_new_prompt_is_read_as_fast_beside_many_sessions_that_draft(
    bench_of: Callable[..., Bench],
) -> None:
    bench = bench_of(chunk=10, nodes_per_pass=8)
    for alias in range(4):
        bench.follow(alias, (7, alias))
    bench.worker.work()
    bench.follow(4, [1] * 20)
    bench.worker.work()
    bench.sent.clear()
    bench.worker.work()
    assert 4 in {alias for _, alias, _ in bench.sent}, "two passes read twenty ids by tens"


def test_a_commit_between_two_passes_redirects_growth(bench: Bench) -> None:
    bench.follow(1)
    bench.worker.work()
    off = (bench.sent[0][2].tokens[0] + 1) % 24
    off = off if off not in bench.sent[0][2].tokens else (off + 1) % 24
    bench.sent.clear()
    bench.progress(1, PROMPT, [off])
    bench.worker.work()
    assert [fragment.base for _, _, fragment in bench.sent] == [len(PROMPT) + 1]
    counts = bench.worker.counts
    assert (counts.reroots, counts.nodes_kept, counts.nodes_dropped) == (1, 0, 2)


def test_an_idle_worker_computes_nothing(bench: Bench) -> None:
    bench.follow(1, node_limit=0)
    bench.follow(2, limit=len(PROMPT) + 1)
    assert bench.settle() == 0
    bench.follow(3)
    assert bench.settle() > 1
    passes = len(bench.drafter.passes)
    assert bench.settle() == 0
    assert len(bench.drafter.passes) == passes


def test_an_end_frees_the_memory_at_once(bench: Bench) -> None:
    bench.follow(1)
    bench.settle()
    assert bench.drafter.cached_tokens > 0
    bench.take(SessionEnded(0, 1))
    assert bench.drafter.cached_tokens == 0
    assert len(bench.worker.roster) == 0


@pytest.mark.parametrize("late", [False, True])
def test_ids_that_the_target_itself_does_not_have_are_refused_by_name(bench: Bench, late: bool) -> None:
    penalised = SamplingParams(temperature=0, repetition_penalty=2)
    ids = [1, 2] if late else [1, 7]
    bench.follow(1, ids, vocabulary_size=6, params=penalised)
    bench.follow(2, PROMPT, params=penalised)
    if late:
        bench.settle()
        bench.progress(1, ids, [7])
    ((_, alias, message),) = bench.refused
    assert (alias, message) == (1, "id 7 is outside the target's vocabulary of 6")
    bench.progress(2, PROMPT, [3])
    assert bench.settle() > 0


@pytest.mark.parametrize("where", ["grow", "commit"])
def test_a_session_that_fails_by_itself_is_refused_and_the_others_go_on(
    bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.follow(1)
    bench.follow(2)

    def fail(*_: Any) -> None:
        raise IndexError("index 7 is out of bounds")

    session = bench.worker.roster.get(0, 1)
    assert session is not None
    monkeypatch.setattr(session, where, fail)
    bench.worker.work()
    bench.progress(1, PROMPT, [3])
    bench.progress(2, PROMPT, [3])
    assert [(alias, message.partition(";")[0]) for _, alias, message in bench.refused] == [
        (1, "the drafter failed on this session")
    ]
    assert "index 7 is out of bounds" in caplog.text
    assert bench.worker.counts.failed_sessions == 1
    assert bench.worker.roster.get(0, 1) is None
    assert bench.settle() > 0
    assert {alias for _, alias, _ in bench.sent} >= {2}


def test_progress_that_does_not_fit_is_refused_and_the_next_follow_starts_from_what_was_right(
    bench: Bench,
) -> None:
    bench.follow(1)
    bench.settle()
    bench.take(Progress(0, 1, len(PROMPT), (7,), 12345))
    assert "follow the session again" in bench.refused[0][2]
    passes = len(bench.drafter.passes)
    bench.follow(2, (*PROMPT, 7), session="s1")
    bench.worker.work()
    assert bench.drafter.passes[passes:] == [1]


def test_a_broken_stream_keeps_caches_for_the_grace_period(bench: Bench) -> None:
    bench.follow(1)
    bench.settle()
    bench.take(StreamClosed(0))
    assert (len(bench.worker.roster), len(bench.worker.roster.kept)) == (0, 1)
    bench.now = 9.9
    bench.take()
    assert bench.drafter.cached_tokens > 0
    bench.now = 10.0
    bench.take()
    assert bench.drafter.cached_tokens == 0
    assert bench.worker.roster.kept == []


@pytest.mark.parametrize(
    ("again", "rows"),
    [
        (PROMPT, 1),  # the last id once more: its logits start the tree
        ((*PROMPT, 8, 9), 2),
        (PROMPT[:3], 1),
        ((*PROMPT[:3], 9, 9, 9), 3),
        ((9, *PROMPT), 6),
    ],
    ids=["same", "longer", "shorter", "parted", "other"],
)
def test_another_verifier_inherits_what_the_cache_has_of_its_ids(
    bench: Bench, again: Sequence[int], rows: int
) -> None:
    bench.follow(1)
    bench.settle()
    bench.take(StreamClosed(0))
    bench.sent.clear()
    passes = len(bench.drafter.passes)
    bench.follow(5, again, stream=3, session="s1", epoch=8, params=SamplingParams(temperature=0.5))
    bench.worker.work()
    assert bench.drafter.passes[passes:] == [rows]
    assert bench.sent[0][:2] == (3, 5)
    assert bench.sent[0][2].prefix_hash == prefix_hash(again)
    assert bench.drafter.cached_tokens == len(again)


def test_another_tenants_session_of_the_same_name_inherits_nothing(bench: Bench) -> None:
    bench.follow(1)
    bench.settle()
    bench.take(StreamClosed(0))
    passes = len(bench.drafter.passes)
    bench.take(Follow(0, 1, SessionKey("u", "s1"), bench.request_for(PROMPT)))
    bench.worker.work()
    assert bench.drafter.passes[passes:] == [len(PROMPT)]


def test_waiting_caches_make_room_for_a_session(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(room=80)
    bench.follow(1)
    bench.settle()
    bench.take(StreamClosed(0))
    bench.follow(2, (9, *PROMPT, *PROMPT, *PROMPT), stream=1)
    assert bench.worker.roster.kept == []
    assert bench.refused == []
    bench.worker.work()
    bench.follow(3, stream=1)
    assert "slots wanted" in bench.refused[0][2]
    assert len(bench.worker.roster) == 1


def test_a_pass_without_memory_is_tried_again_with_one_session_less(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculative.errors import Overloaded

    bench.follow(1)
    bench.follow(2)
    forward = bench.drafter.forward

    def cramped(batch: Any) -> Any:
        if len(batch) > 1:
            raise Overloaded("no slots are free", retry_after_s=1)
        return forward(batch)

    monkeypatch.setattr(bench.drafter, "forward", cramped)
    bench.settle()
    assert bench.refused == [(0, 2, "no slots are free")]
    assert {alias for _, alias, _ in bench.sent} == {1}


def test_logits_that_are_no_numbers_cost_their_session_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.follow(1)
    bench.follow(2, (9, 9))
    logits = bench.drafter.logits
    broken = np.full(24, np.nan, dtype=np.float32)
    monkeypatch.setattr(bench.drafter, "logits", lambda ids: broken if ids[0] == 9 else logits(ids))
    bench.settle()
    assert [(alias, "nan" in message) for _, alias, message in bench.refused] == [(2, True)]
    assert {alias for _, alias, _ in bench.sent} == {1}


def test_a_failing_pass_refuses_its_sessions_and_the_worker_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.follow(1)
    with monkeypatch.context() as broken:
        broken.setattr(bench.drafter, "forward", lambda batch: 1 / 0)
        bench.worker.work()
    assert bench.refused == [(0, 1, "the drafter failed; its log says why")]
    assert "ZeroDivisionError" in caplog.text
    assert bench.drafter.cached_tokens == 0
    bench.follow(2)
    assert bench.settle() > 0


def test_a_worker_that_ends_shuts_its_drafter_down(bench: Bench) -> None:
    bench.worker.stop()
    bench.worker.run()
    assert bench.drafter.is_shut_down


@pytest.mark.parametrize("policy", [*POLICIES, "fixed:1", "confidence:1", "entropy:1", "learnt:0"])
def test_every_policy_drafts_along_a_whole_request(bench: Bench, policy: str) -> None:
    bench.follow(1, policy=policy)
    ids = list(PROMPT)
    for number in range(12):
        bench.now += 0.005
        bench.settle()
        fresh = [int(bench.drafter.logits(ids).argmax())]
        if number % 3:  # rounds of one and of two tokens
            fresh.append(int(bench.drafter.logits([*ids, *fresh]).argmax()))
        bench.progress(1, ids, fresh)
        ids += fresh
    assert not bench.refused
    sure = policy == "learnt:0"  # a path without any risk has no node
    assert bool(bench.worker.counts.nodes_committed) is not sure, "the target chose what the drafter would"
