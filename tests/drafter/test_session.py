"""One followed session: growth, re-rooting, and what the cache is asked to compute."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.draft_tree import Growth
from drafter_service.session import DraftingSession
from outrider.source.events import DecodingRequest
from speculative.draft_pool import DraftPool
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.drafter.support.fake_drafter import report, session_of

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2)
GROWTH = Growth(children=2, scale=1.0, floor=0.05, depth=4)


def grow_out(drafter: Any, session: DraftingSession, one_pass: Callable[..., int]) -> int:
    """Grows until nothing is worth computing; returns the rows it took."""
    rows = 0
    while (more := one_pass(drafter, session, nodes=3)) or session.take_fragments():
        session.take_fragments()
        rows += more
    return rows


def paths(session: DraftingSession) -> dict[tuple[int, ...], float]:
    """Every node in flight: its drafted path and survival."""
    tree = session._tree
    return {session._path(node): node.survival for node in tree.nodes() if node.sent}


def test_a_greedy_draft_without_siblings_is_what_the_model_would_say(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    session = session_of(
        request_for(PROMPT), fake.open(0), fake.abilities, Growth(children=1, floor=0.0, depth=5)
    )
    grow_out(fake, session, one_pass)
    ids = list(PROMPT)
    for _ in range(5):
        ids.append(int(fake.logits(ids).argmax()))
    assert max(paths(session), key=len) == tuple(ids[len(PROMPT) :])


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_that_was_moved_at_random_is_the_tree_of_a_fresh_follow(
    fake: Any,
    request_for: Callable[..., DecodingRequest],
    one_pass: Callable[..., int],
    params: SamplingParams,
) -> None:
    chance = random.Random(5)
    request = request_for(PROMPT, params=params)
    moved = session_of(request, fake.open(0), fake.abilities, GROWTH)
    ids = list(PROMPT)
    for _ in range(30):
        for _ in range(chance.randrange(4)):
            one_pass(fake, moved, nodes=chance.randint(1, 3))
            moved.take_fragments()
        known = sorted(paths(moved), key=len)
        run = list(chance.choice(known)) if known and chance.random() < 0.8 else []
        run += [chance.randrange(24) for _ in range(chance.randrange(2))]
        if run:
            ids += run
            report(moved, len(ids) - len(run), run, prefix_hash(ids))
    grow_out(fake, moved, one_pass)
    fresh = session_of(replace(request, ids=tuple(ids)), fake.open(0), fake.abilities, GROWTH)
    grow_out(fake, fresh, one_pass)
    assert paths(moved) == pytest.approx(paths(fresh))
    assert len(paths(moved)) > 4


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), node_limit=st.integers(0, 40))
def test_what_the_verifiers_pool_holds_is_what_is_in_flight(
    fake_drafter: Any,
    request_for: Callable[..., DecodingRequest],
    one_pass: Callable[..., int],
    seed: int,
    node_limit: int,
) -> None:
    chance = random.Random(seed)
    fake = fake_drafter()
    request = request_for(
        PROMPT, node_limit=node_limit, params=SAMPLED if seed % 2 else SamplingParams(temperature=0)
    )
    session = session_of(request, fake.open(0), fake.abilities, GROWTH)
    pool = DraftPool(PROMPT, epoch=request.epoch, vocabulary_size=24, limit=request.limit)
    ids = list(PROMPT)
    for _ in range(12):
        one_pass(fake, session, nodes=chance.randint(1, 3))
        for fragment in session.take_fragments():
            offer = pool.offer(fragment)
            assert offer.kept == len(fragment), offer
        assert pool.drafted == session.in_flight <= node_limit
        if chance.random() < 0.5:
            tree = pool.best_tree(100)
            path = tree.path(chance.randrange(len(tree))) if len(tree) else ()
            run = [*(tree.tokens[node] for node in path), chance.randrange(24)]
            ids += run
            pool.commit(run)
            report(session, len(ids) - len(run), run, pool.hash_at(len(ids)))


def test_nothing_that_was_expanded_is_computed_again(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    session = session_of(
        request_for(PROMPT), fake.open(0), fake.abilities, replace(GROWTH, children=1, floor=0)
    )
    rows = grow_out(fake, session, one_pass)
    assert rows == len(PROMPT) + 3  # a depth of 4: its last node is no input
    chain = max(paths(session), key=len)
    ids = [*PROMPT, *chain[:3]]
    report(session, len(PROMPT), chain[:3], prefix_hash(ids))
    assert grow_out(fake, session, one_pass) == 3  # three deeper, none of the committed ones
    off = (chain[3] + 1) % 24
    report(session, len(ids), [off], prefix_hash([*ids, off]))
    assert one_pass(fake, session) == 1  # the target's own token alone


def test_a_prompt_is_read_in_chunks_and_a_commit_may_come_between(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    session = session_of(request_for(PROMPT), fake.open(0), fake.abilities, GROWTH)
    assert session.unread == 8
    assert [one_pass(fake, session, chunk=3) for _ in range(2)] == [3, 3]
    assert session.unread == 2
    assert session.take_fragments() == []
    report(session, len(PROMPT), [8, 9], prefix_hash([*PROMPT, 8, 9]))
    assert [one_pass(fake, session, chunk=3) for _ in range(2)] == [3, 1]
    assert session.unread == 0
    (fragment,) = session.take_fragments()
    assert fragment.base == len(PROMPT) + 2
    assert fragment.prefix_hash == prefix_hash([*PROMPT, 8, 9])


def test_progress_that_is_known_already_changes_nothing(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    session = session_of(request_for(PROMPT), fake.open(0), fake.abilities, GROWTH)
    grow_out(fake, session, one_pass)
    before = paths(session)
    report(session, 2, PROMPT[2:5], prefix_hash(PROMPT[:5]))
    report(session, len(PROMPT), [], prefix_hash(PROMPT))
    assert paths(session) == before
    report(session, 6, [*PROMPT[6:], 8], prefix_hash([*PROMPT, 8]))
    assert len(session.ids) == len(PROMPT) + 1


def test_nothing_is_drafted_where_it_cannot_be_accepted(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    limit = len(PROMPT) + 4
    session = session_of(
        request_for(PROMPT, limit=limit), fake.open(0), fake.abilities, replace(GROWTH, depth=9)
    )
    grow_out(fake, session, one_pass)
    assert max(len(path) for path in paths(session)) == 3  # the last id is the target's own
    done = session_of(request_for(PROMPT, limit=len(PROMPT) + 1), fake.open(0), fake.abilities, GROWTH)
    assert done.plan(3, 100) is None
    assert done.unread == 0


def test_drafts_end_where_the_drafters_context_does(
    fake_drafter: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    short = fake_drafter(max_length=len(PROMPT) + 2)
    session = session_of(request_for(PROMPT), short.open(0), short.abilities, replace(GROWTH, depth=9))
    grow_out(short, session, one_pass)
    assert max(len(path) for path in paths(session)) == 3


def test_ids_that_are_no_tokens_are_never_drafted(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    for bound, width in ((5, 24), (24, 5)):
        abilities = replace(fake.abilities, bound=bound)
        request = request_for((3, 1), vocabulary_size=width, params=SAMPLED)
        session = session_of(request, fake.open(0), abilities, replace(GROWTH, floor=0.001))
        grow_out(fake, session, one_pass)
        assert {token for path in paths(session) for token in path} <= set(range(5))
        assert paths(session)
