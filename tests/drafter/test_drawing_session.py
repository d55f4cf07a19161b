"""A followed session whose criterion needs q: windows drawn from the model's own law, and sent with it."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from drafter_service.draft_tree import Growth
from drafter_service.drawing_session import DrawingSession
from drafter_service.worker import DrafterWorker
from outrider.source.events import DecodingRequest, Follow, Outgoing, Progress
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from speculative.draft_law import DraftLaws
from speculative.drawn_window import DrawnWindow
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.window_shape import SHAPES

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2)


def drawing(fake: Any, request: DecodingRequest) -> DrawingSession:
    """A session of the fake drafter."""
    profile = SourceProfile("fake", "fake", readable_ids=fake.abilities.width, max_length=200)
    ids = FollowedIds(request.ids, request.vocabulary_size, profile)
    return DrawingSession(Follow(0, 1, SessionKey("t", "s"), request), ids, fake.open(0), fake.abilities)


def next_window(fake: Any, session: DrawingSession, one_pass: Callable[..., int]) -> DrawnWindow:
    """The session's next window; nothing is sent before it is whole."""
    while not (found := session.take_fragments()):
        assert one_pass(fake, session)
    (window,) = found
    assert isinstance(window, DrawnWindow)
    assert not session.take_fragments()
    return window


def path_to(window: DrawnWindow, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_to(window, window.parents[node]), window.tokens[node])


@pytest.mark.parametrize("name", SHAPES)
def test_each_node_is_drawn_from_the_models_law_at_its_own_path(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int], name: str
) -> None:
    """Through random commits, on and off what was drawn: neither cache nor history goes astray."""
    chance = random.Random(3)
    session = drawing(fake, request_for(PROMPT, params=SAMPLED, criterion=name, node_limit=12))
    ids = list(PROMPT)
    for _ in range(12):
        window = next_window(fake, session, one_pass)
        assert (window.base, window.prefix_hash) == (len(ids), prefix_hash(ids))
        laws = DraftLaws(SAMPLED, ids, len(PROMPT), width=24, bound=24)
        for node, law in zip(window.inner, window.laws, strict=True):
            path = path_to(window, node)
            expected = laws.after(fake.logits([*ids, *path]), path)
            assert (law.ids.tolist(), law.weights.tolist()) == (
                expected.ids.tolist(),
                expected.weights.tolist(),
            )
        run = list(path_to(window, chance.randrange(-1, len(window))))
        run += [chance.randrange(24) for _ in range(chance.randrange(2))] or [7]
        ids += run
        session.commit(session.ids.extend(len(ids) - len(run), run, prefix_hash(ids)))


@pytest.mark.parametrize("name", SHAPES)
def test_a_windows_shape_and_its_passes_do_not_depend_on_what_was_drawn(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int], name: str
) -> None:
    shape = SHAPES[name].within(12)
    passes = set()
    for seed in range(12):
        before = len(fake.passes)
        session = drawing(fake, request_for(PROMPT, params=SAMPLED, criterion=name, node_limit=12, seed=seed))
        window = next_window(fake, session, one_pass)
        passes.add(len(fake.passes) - before)
        assert window.parents.count(-1) == shape.draws
        depths = [len(path_to(window, node)) for node in range(len(window))]
        assert max(depths) == shape.depth
    assert passes == {shape.depth}


def test_two_windows_share_no_random_number(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    """With numbers keyed by position, the second window would repeat the first where laws are equal."""
    flat = SamplingParams(temperature=100.0)
    session = drawing(fake, request_for(PROMPT, params=flat, criterion="ratio", node_limit=6))
    first = next_window(fake, session, one_pass)
    ids = [*PROMPT, first.tokens[0]]
    session.commit(session.ids.extend(len(PROMPT), ids[-1:], prefix_hash(ids)))
    second = next_window(fake, session, one_pass)
    assert second.tokens[:5] != first.tokens[1:]


def test_the_same_base_gives_the_same_window(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    request = request_for(PROMPT, params=SAMPLED, criterion="multi_step", node_limit=12)
    one, other = (next_window(fake, drawing(fake, request), one_pass) for _ in range(2))
    assert (one.tokens, one.parents) == (other.tokens, other.parents)


def test_near_the_end_windows_get_shorter_and_then_there_are_none(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    for left, depth in ((5, 4), (2, 1)):
        limit = len(PROMPT) + left
        session = drawing(fake, request_for(PROMPT, params=SAMPLED, criterion="block", limit=limit))
        assert len(next_window(fake, session, one_pass)) == depth
    over = drawing(fake, request_for(PROMPT, criterion="block", limit=len(PROMPT) + 1))
    assert over.plan(1, 100) is None


def test_after_a_restart_the_window_is_drawn_anew(
    fake: Any, request_for: Callable[..., DecodingRequest], one_pass: Callable[..., int]
) -> None:
    session = drawing(fake, request_for(PROMPT, params=SAMPLED, criterion="ratio", node_limit=4))
    first = next_window(fake, session, one_pass)
    session.restart(fake.open(0))
    assert next_window(fake, session, one_pass).tokens == first.tokens


def test_the_worker_draws_windows_and_asks_rounds_to_wait_for_them(
    fake: Any, request_for: Callable[..., DecodingRequest]
) -> None:
    sent: list[Outgoing] = []
    profile = SourceProfile("drafter", fake.model, readable_ids=24, max_length=200, noun="drafter")
    worker = DrafterWorker(
        fake, profile, lambda out: sent.extend(out.values()), growth=Growth(), nodes_per_pass=1, chunk=100
    )
    request = request_for(PROMPT, params=SAMPLED, criterion="k_seq", node_limit=12)
    worker.submit(Follow(0, 1, SessionKey("t", "s"), request))
    worker.take_in(wait=False)
    while worker.work():
        pass
    assert sent[0].waits == {1: 16}
    drafts = [fragment for out in sent for _, fragment in out.drafts]
    assert [type(draft) for draft in drafts] == [DrawnWindow]
    worker.step_s = 0.01
    worker.submit(Progress(0, 1, len(PROMPT), (7,), prefix_hash([*PROMPT, 7])))
    worker.take_in(wait=False)
    assert sent[-1].waits == {1: 256}, "four times four passes of 10 ms, to the next power of two"
    worker.shut_down()


def test_a_session_of_a_criterion_without_draws_drafts_as_always(
    fake: Any, request_for: Callable[..., DecodingRequest]
) -> None:
    sent: list[Outgoing] = []
    profile = SourceProfile("drafter", fake.model, readable_ids=24, max_length=200, noun="drafter")
    worker = DrafterWorker(
        fake, profile, lambda out: sent.extend(out.values()), growth=Growth(), nodes_per_pass=1, chunk=100
    )
    worker.submit(Follow(0, 1, SessionKey("t", "s"), request_for(PROMPT, criterion="of_tomorrow")))
    worker.take_in(wait=False)
    while worker.work():
        pass
    assert all(not isinstance(fragment, DrawnWindow) for out in sent for _, fragment in out.drafts)
    assert not any(out.waits for out in sent)
    worker.shut_down()
