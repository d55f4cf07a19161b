"""One followed session: growth, re-rooting, and what the cache is asked to compute."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.draft_tree import Growth
from drafter_service.follower import Follower, NotFollowed, Request
from speculative.hashing import prefix_hash
from speculative.merge import DraftPool
from speculative.params import SamplingParams

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2)
GROWTH = Growth(children=2, scale=1.0, floor=0.05, depth=4)


def grow_out(drafter: Any, follower: Follower, one_pass: Callable[..., int]) -> int:
    """Grows until nothing is worth computing; returns the rows it took."""
    rows = 0
    while (more := one_pass(drafter, follower, nodes=3)) or follower.take_fragments():
        follower.take_fragments()
        rows += more
    return rows


def paths(follower: Follower) -> dict[tuple[int, ...], float]:
    """Every node in flight: its drafted path and survival."""
    tree = follower._tree
    return {follower._path(node): node.survival for node in tree.nodes() if node.sent}


def test_a_greedy_draft_without_siblings_is_what_the_model_would_say(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    follower = Follower(
        request_for(PROMPT), fake.open(0), fake.abilities, Growth(children=1, floor=0.0, depth=5)
    )
    grow_out(fake, follower, one_pass)
    ids = list(PROMPT)
    for _ in range(5):
        ids.append(int(fake.logits(ids).argmax()))
    assert max(paths(follower), key=len) == tuple(ids[len(PROMPT) :])


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_that_was_moved_at_random_is_the_tree_of_a_fresh_follow(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int], params: SamplingParams
) -> None:
    chance = random.Random(5)
    request = request_for(PROMPT, params=params)
    moved = Follower(request, fake.open(0), fake.abilities, GROWTH)
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
            moved.progress(len(ids) - len(run), run, prefix_hash(ids))
    grow_out(fake, moved, one_pass)
    fresh = Follower(replace(request, ids=tuple(ids)), fake.open(0), fake.abilities, GROWTH)
    grow_out(fake, fresh, one_pass)
    assert paths(moved) == pytest.approx(paths(fresh))
    assert len(paths(moved)) > 4


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), node_limit=st.integers(0, 40))
def test_what_the_verifiers_pool_holds_is_what_is_in_flight(
    fake_drafter: Any,
    request_for: Callable[..., Request],
    one_pass: Callable[..., int],
    seed: int,
    node_limit: int,
) -> None:
    chance = random.Random(seed)
    fake = fake_drafter()
    request = request_for(
        PROMPT, node_limit=node_limit, params=SAMPLED if seed % 2 else SamplingParams(temperature=0)
    )
    follower = Follower(request, fake.open(0), fake.abilities, GROWTH)
    pool = DraftPool(PROMPT, epoch=request.epoch, vocabulary_size=24, limit=request.limit)
    ids = list(PROMPT)
    for _ in range(12):
        one_pass(fake, follower, nodes=chance.randint(1, 3))
        for fragment in follower.take_fragments():
            offer = pool.offer(fragment)
            assert offer.kept == len(fragment), offer
        assert pool.pending == follower.in_flight <= node_limit
        if chance.random() < 0.5:
            tree = pool.best_tree(100)
            path = tree.path(chance.randrange(len(tree))) if len(tree) else ()
            run = [*(tree.tokens[node] for node in path), chance.randrange(24)]
            ids += run
            pool.commit(run)
            follower.progress(len(ids) - len(run), run, pool.hash_at(len(ids)))


def test_nothing_that_was_expanded_is_computed_again(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    follower = Follower(
        request_for(PROMPT), fake.open(0), fake.abilities, replace(GROWTH, children=1, floor=0)
    )
    rows = grow_out(fake, follower, one_pass)
    assert rows == len(PROMPT) + 3  # a depth of 4: its last node is no input
    chain = max(paths(follower), key=len)
    ids = [*PROMPT, *chain[:3]]
    follower.progress(len(PROMPT), chain[:3], prefix_hash(ids))
    assert grow_out(fake, follower, one_pass) == 3  # three deeper, none of the committed ones
    off = (chain[3] + 1) % 24
    follower.progress(len(ids), [off], prefix_hash([*ids, off]))
    assert one_pass(fake, follower) == 1  # the target's own token alone


def test_a_prompt_is_read_in_chunks_and_a_commit_may_come_between(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    follower = Follower(request_for(PROMPT), fake.open(0), fake.abilities, GROWTH)
    assert follower.unread == 8
    assert [one_pass(fake, follower, chunk=3) for _ in range(2)] == [3, 3]
    assert follower.unread == 2
    assert follower.take_fragments() == []
    follower.progress(len(PROMPT), [8, 9], prefix_hash([*PROMPT, 8, 9]))
    assert [one_pass(fake, follower, chunk=3) for _ in range(2)] == [3, 1]
    assert follower.unread == 0
    (fragment,) = follower.take_fragments()
    assert fragment.base == len(PROMPT) + 2
    assert fragment.prefix_hash == prefix_hash([*PROMPT, 8, 9])


def test_progress_that_is_known_already_changes_nothing(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    follower = Follower(request_for(PROMPT), fake.open(0), fake.abilities, GROWTH)
    grow_out(fake, follower, one_pass)
    before = paths(follower)
    follower.progress(2, PROMPT[2:5], prefix_hash(PROMPT[:5]))
    follower.progress(len(PROMPT), [], prefix_hash(PROMPT))
    assert paths(follower) == before
    follower.progress(6, [*PROMPT[6:], 8], prefix_hash([*PROMPT, 8]))
    assert follower.length == len(PROMPT) + 1


@pytest.mark.parametrize(
    ("position", "ids", "hash_", "why"),
    [
        (len(PROMPT) + 1, [8], prefix_hash([*PROMPT, 0, 8]), "ids 8 to 8 are missing"),
        (len(PROMPT), [8], 1, "the hash over 9 ids is"),
        (0, [3], 1, "the hash over 1 ids is"),
        (len(PROMPT), [24], prefix_hash([*PROMPT, 24]), "id 24 is outside this drafter's vocabulary of 24"),
        (len(PROMPT), [8] * 193, 0, "the session has 201 ids; this drafter can follow 200"),
    ],
)
def test_progress_that_does_not_fit_says_so(
    fake: Any, request_for: Callable[..., Request], position: int, ids: list[int], hash_: int, why: str
) -> None:
    follower = Follower(request_for(PROMPT), fake.open(0), fake.abilities, GROWTH)
    with pytest.raises(NotFollowed, match=why):
        follower.progress(position, ids, hash_)


def test_nothing_is_drafted_where_it_cannot_be_accepted(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    limit = len(PROMPT) + 4
    follower = Follower(
        request_for(PROMPT, limit=limit), fake.open(0), fake.abilities, replace(GROWTH, depth=9)
    )
    grow_out(fake, follower, one_pass)
    assert max(len(path) for path in paths(follower)) == 3  # the last id is the target's own
    done = Follower(request_for(PROMPT, limit=len(PROMPT) + 1), fake.open(0), fake.abilities, GROWTH)
    assert done.plan(3, 100) is None
    assert done.unread == 0


def test_drafts_end_where_the_drafters_context_does(
    fake_drafter: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    short = fake_drafter(max_length=len(PROMPT) + 2)
    follower = Follower(request_for(PROMPT), short.open(0), short.abilities, replace(GROWTH, depth=9))
    grow_out(short, follower, one_pass)
    assert max(len(path) for path in paths(follower)) == 3


def test_ids_that_are_no_tokens_are_never_drafted(
    fake: Any, request_for: Callable[..., Request], one_pass: Callable[..., int]
) -> None:
    for bound, width in ((5, 24), (24, 5)):
        abilities = replace(fake.abilities, bound=bound)
        request = request_for((3, 1), vocabulary_size=width, params=SAMPLED)
        follower = Follower(request, fake.open(0), abilities, replace(GROWTH, floor=0.001))
        grow_out(fake, follower, one_pass)
        assert {token for path in paths(follower) for token in path} <= set(range(5))
        assert paths(follower)
