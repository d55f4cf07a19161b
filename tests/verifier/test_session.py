"""A session without a model: rows in, logits out."""

from collections.abc import Callable

import numpy as np
import pytest

from outrider.wire.codec import SessionKey
from speculative.digest import HostDigest
from speculative.errors import EmptySupport
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.stop import FinishReason, StopChecker
from verifier_service.engine.session import Session
from verifier_service.engine.step import StepRows
from verifier_service.sessions.request import SessionRequest, SourceAddress, SourceSet

WIDTH = 16
GREEDY = SamplingParams(temperature=0.0)
REMOTE = SourceSet(("drafter",), proposers=frozenset(), remote=frozenset({1}))
INSIDE = SourceSet(("lookup",), proposers=frozenset({1}), remote=frozenset())


def session(
    ids: tuple[int, ...] = (1, 2, 3),
    *,
    sources: SourceSet = REMOTE,
    limit: int = 40,
    eos: int = 15,
    params: SamplingParams = GREEDY,
    width: int = WIDTH,
) -> Session:
    request = SessionRequest(
        key=SessionKey("", "s"),
        epoch=4,
        ids=ids,
        prompt_length=len(ids),
        limit=limit,
        params=params,
        seed=0,
        stops=(),
        time_left_s=None,
        node_limit=6,
        sources=tuple(SourceAddress(name, "") for name in sources.names),
    )
    stop_checker = StopChecker(frozenset({eos}), limit, (), None, ids, len(ids))
    return Session(1, request, stop_checker, width, sources)


def chain(session: Session, *tokens: int, base: int | None = None) -> Fragment:
    ids = session.ids[: len(session.ids) if base is None else base]
    count = len(tokens)
    survival = tuple(0.9**depth for depth in range(1, count + 1))
    return Fragment(1, 4, len(ids), prefix_hash(ids), tokens, tuple(range(-1, count - 1)), survival)


def likes(*tokens: int) -> Callable[[int], HostDigest]:
    """Digests of one row per token, which is the likeliest there; the first is the root's."""
    rows = np.zeros((len(tokens), WIDTH), np.float32)
    rows[range(len(tokens)), tokens] = 1.0
    return lambda node: HostDigest(rows[node + 1])


def test_a_prompt_is_a_chain_and_its_last_row_is_wanted() -> None:
    running = session()
    assert running.uncomputed == 3
    rows = running.step_rows(3, 6)
    assert (rows.tokens, rows.parents, rows.want) == ((1, 2, 3), (-1, 0, 1), (2,))


def test_noise_is_drawn_ahead_unless_greedy_or_left_to_a_kernel_that_draws_few_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = session(params=SamplingParams(temperature=0.8, top_k=4), width=256)
    many = session(params=SamplingParams(temperature=0.8, top_k=5), width=256)
    assert session().noise is None
    assert few.noise is not None
    monkeypatch.setattr("verifier_service.engine.session.current_kernel", object)
    assert few.noise is None
    assert many.noise is not None
    assert session(params=SamplingParams(temperature=0.8)).noise is not None


def test_part_of_a_prompt_wants_nothing_and_commits_its_rows() -> None:
    running = session()
    rows = running.step_rows(2, 6)
    assert (rows.tokens, rows.want, rows.final) == ((1, 2), (), False)
    assert running.skip(rows) == (0, 1)
    assert running.uncomputed == 1
    assert running.step_rows(1, 6).parents == (-1,)


def test_a_tree_hangs_below_the_last_committed_id() -> None:
    running = session()
    running.offer(chain(running, 5, 6))
    running.offer(chain(running, 7))
    rows = running.step_rows(3, 6)
    assert rows.tokens == (1, 2, 3, 5, 6, 7)
    assert rows.parents == (-1, 0, 1, 2, 3, 2)
    assert rows.want == (2, 3, 4, 5)


def finish_step(running: Session, rows: StepRows, *tokens: int) -> object:
    return running.commit(rows, running.match(rows, running.target(likes(*tokens))))


def test_accepted_nodes_count_for_their_source_and_their_rows_are_kept() -> None:
    running = session()
    running.offer(chain(running, 5, 6, 7))
    rows = running.step_rows(3, 6)
    done = running.commit(rows, running.match(rows, running.target(likes(5, 6, 9, 0))))
    assert done.tokens == (5, 6, 9)
    assert done.token_sources == bytes([1, 1, 0])
    assert done.path == (0, 1, 2, 3, 4)
    assert (done.position, running.ids, running.uncomputed) == (3, [1, 2, 3, 5, 6, 9], 1)
    usage = running.usage()
    assert (usage.rounds, usage.completion_tokens, usage.admitted) == (1, 3, 3)
    assert (usage.accepted, usage.drafted) == ({"drafter": 2}, {"drafter": 3})


def test_nothing_past_an_end_of_sequence_id_is_committed() -> None:
    running = session(eos=6)
    running.offer(chain(running, 5, 6, 7))
    rows = running.step_rows(3, 6)
    done = running.commit(rows, running.match(rows, running.target(likes(5, 6, 7, 8))))
    assert (done.tokens, done.token_sources, done.reason) == ((5, 6), bytes([1, 1]), FinishReason.STOP)
    assert running.usage().accepted == {"drafter": 2}


def test_a_limit_inside_an_accepted_run_cuts_it() -> None:
    running = session(limit=5)
    running.offer(chain(running, 5, 6, 7))
    rows = running.step_rows(3, 6)
    assert len(rows.tree) == 1, "what would lie at the limit or past it is not computed"
    done = running.commit(rows, running.match(rows, running.target(likes(5, 6))))
    assert (done.tokens, done.reason) == ((5, 6), FinishReason.LENGTH)


def test_drafts_that_come_while_a_step_runs_are_kept_for_the_next() -> None:
    running = session()
    rows = running.step_rows(3, 6)
    running.offer(chain(running, 5, 6))
    finish_step(running, rows, 5)
    assert running.step_rows(1, 6).tokens == (5, 6)


def test_a_source_inside_drafts_for_the_step_that_ends_the_prefill() -> None:
    running = session((1, 2, 3, 4, 1, 2), sources=INSIDE)
    assert running.prepare(4) == []
    running.skip(running.step_rows(4, 6))
    ((fragment, offer),) = running.prepare(2)
    assert fragment.tokens[:2] == (3, 4)
    assert offer.kept == len(fragment)
    assert running.step_rows(2, 6).tree.tokens[:2] == (3, 4)


def test_drafts_worth_less_than_their_rows_are_held_back_but_for_one_in_eight() -> None:
    running = session((1, 2, 3, 4, 1, 2), sources=INSIDE)
    running.skip(running.step_rows(4, 6))
    offered = [len(running.prepare(2, least=1.0)) for _ in range(16)]
    assert offered == ([1] + [0] * 7) * 2
    assert running.sources.held_back == 1
    assert len(running.prepare(2, least=0.1)) == 1, "a node that may be worth its row is offered"
    assert running.sources.held_back == 0


def test_what_a_draft_is_worth_is_what_drafts_like_it_were_worth() -> None:
    running = session((1, 2, 3, 4, 1, 2), sources=INSIDE)
    running.skip(running.step_rows(4, 6))
    ((fragment, _),) = running.prepare(2, least=0.3)
    for _ in range(40):
        running.sources.calibrator.saw(1, fragment.survival[0], hit=False)
    assert [len(running.prepare(2, least=0.3)) for _ in range(4)] == [1, 0, 0, 0]


def test_nan_changes_nothing() -> None:
    running = session()
    rows = running.step_rows(3, 6)
    with pytest.raises(EmptySupport):
        running.match(rows, running.target(lambda node: HostDigest(np.full(WIDTH, np.nan, np.float32))))
    assert (running.ids, running.cached) == ([1, 2, 3], 0)


def test_a_muted_source_is_not_listened_to_and_not_waited_for() -> None:
    running = session()
    assert running.sources.listens_to(1)
    assert 1 in running.sources.latencies
    running.sources.mute(1)
    running.use_sources(REMOTE)
    assert not running.sources.listens_to(1)
    assert running.sources.latencies == {}


def test_sources_that_change_keep_what_they_know() -> None:
    running = session((1, 2, 3, 4, 1, 2), sources=INSIDE)
    running.prepare(6)
    both = SourceSet(("lookup", "drafter"), proposers=frozenset({1}), remote=frozenset({2}))
    running.use_sources(both)
    assert running.prepare(6)[0][1].duplicate > 0
    assert running.name_of(2) == "drafter"
    running.use_sources(SourceSet(both.names, proposers=frozenset(), remote=frozenset({2})))
    assert running.prepare(6) == []


def test_a_wait_is_considered_only_where_a_source_has_been_heard() -> None:
    running = session()
    assert running.patience_ms(0.0, 8.0, 4.0, 0) == {}
    for start in (0.0, 10.0, 20.0):
        running.published(start)
        running.sources.latencies[1].arrived(start + 1.0)
    running.published(30.0)
    assert running.patience_ms(30.0, 8.0, 4.0, 0) == {1: pytest.approx(1.0)}
    for token in range(4, 10):
        running.offer(chain(running, token))
    assert running.patience_ms(30.0, 8.0, 4.0, 6) == {}, "six nodes are all that the request lets in"
