"""A swap of proposers between two passes: ids stay, and drafts are those of the weights that serve."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from attention_head import LAYERS, AttentionHead
from core_driver import GREEDY, SAMPLED, CoreDriver
from plane_target import NEW, PROMPT, Ids, fresh, layer_of, plain, target

from outrider.lm.kv.blocks import BLOCK
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.lm.families import VOCABULARY
from verifier_service.engine.core import AwaitDrafts, Idle, TargetPass
from verifier_service.engine.messages import Cancel, InFlight, Offers, SwapProposer
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
)
from verifier_service.proposers.price import ProposerPrice


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProposerPrice, "begins", lambda *_: True)


class Swapping:
    """Sessions whose head is swapped amid them."""

    def __init__(self, blocks: int = 256, tenant: str = "", **limits: Any) -> None:
        self.needs = replace(AttentionHead.needs, tenant=tenant)
        self.heads = [self.head(0)]
        self.driver = CoreDriver(target(blocks), {"bigram": self.heads[0]}, **limits)
        self.answers: dict[int, tuple[Ids, list[int]]] = {}

    def head(self, version: int) -> AttentionHead:
        head = AttentionHead(layer_of(version), self.truth)
        head.needs = self.needs
        return head

    def truth(self, ids: Ids) -> int | None:
        """The right token of a greedy session, two times out of three."""
        for prompt, answer in self.answers.values():
            place = len(ids) - len(prompt)
            if place >= 0 and ids == (*prompt, *answer[:place]) and place < len(answer):
                return answer[place] if len(ids) % 3 else None
        return None

    def open(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0, tenant: str = ""
    ) -> Session:
        answer = plain(prompt, params=params, seed=seed)
        sources = ("bigram",) if tenant == self.needs.tenant else ()
        session = self.driver.open(prompt, NEW, params, seed, sources, tenant=tenant)
        self.answers[session.handle] = tuple(prompt), answer
        return session

    def swap(self) -> "Future[BatchedProposer]":
        self.heads.append(self.head(len(self.heads)))
        swap = SwapProposer("bigram", self.heads[-1], Future())
        self.driver.core.apply(swap, self.driver.now)
        return swap.before

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def check(self) -> None:
        """Runs to the end: ids are plain decoding's, and each draft a fresh session's of its version."""
        self.driver.run()
        for handle, (_, answer) in self.answers.items():
            updates = [update for update in self.driver.updates if update.handle == handle]
            assert [id_ for update in updates for id_ in update.ids] == answer
        assert not self.driver.core.proposers.muted
        for version, head in enumerate(self.heads):
            for ids, said in head.said:
                assert said == fresh(layer_of(version), ids)[: len(said)], version


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_running_sessions_go_on_without_drafts_and_new_ones_get_those_of_the_new_weights(
    params: SamplingParams,
) -> None:
    swapping = Swapping()
    running = [swapping.open(PROMPT, params), swapping.open(PROMPT[:5], params, 3)]
    swapping.steps(4)
    assert swapping.heads[0].said
    assert swapping.swap().result(0) is swapping.heads[0]
    swapping.steps(3)
    assert not swapping.heads[1].said, "what the sessions hold was written by the weights before"
    said = len(swapping.heads[0].said)
    since = swapping.open((7, *PROMPT), params)
    swapping.check()
    assert len(swapping.heads[0].said) == said
    assert {ids[: len(PROMPT) + 1] for ids, _ in swapping.heads[1].said} == {(7, *PROMPT)}
    assert all(map(swapping.driver.finish_of, [*running, since]))
    assert swapping.driver.core.proposers.swaps == 1


def test_a_prefix_that_was_cached_before_a_swap_is_computed_again_and_drafted_behind() -> None:
    swapping = Swapping()
    swapping.open(PROMPT)
    swapping.driver.run()
    swapping.open((*PROMPT, 4))
    swapping.driver.run()
    counts = swapping.driver.core.kv.prefixes.counts
    found = counts.hit
    assert found
    swapping.swap().result(0)
    behind = swapping.open((*PROMPT, 5))
    swapping.driver.run()
    assert counts.hit == found
    assert swapping.heads[1].said
    swapping.open((*PROMPT, 6))
    swapping.check()
    assert counts.hit > found, f"{behind.cached} positions are cached anew"


def test_what_a_running_session_goes_on_with_after_a_swap_is_found_by_nobody() -> None:
    swapping = Swapping()
    begun, apart = PROMPT[:5], (8, *PROMPT[:BLOCK])
    session = swapping.open(begun)
    swapping.open(apart)
    swapping.steps(1)
    swapping.swap().result(0)
    swapping.steps(2)
    swapping.open(apart)  # has the same prefix as a running session, and computes it anew
    swapping.driver.run()
    drafted, counts = len(swapping.heads[1].said), swapping.driver.core.kv.prefixes.counts
    assert drafted
    longer = tuple(session.ids[: BLOCK + 2])
    swapping.open(longer)
    swapping.driver.run()
    assert counts.hit == 0, "the running session filled its first block after the swap"
    swapping.open((*longer, 3))
    swapping.open((*apart, *session.ids[:4]))
    swapping.check()
    assert counts.hit == 2 * BLOCK
    after = [ids for ids, _ in swapping.heads[1].said[drafted:]]
    assert {ids[: len(longer)] for ids in after} >= {longer, (*apart, *session.ids[:1])}


def test_a_session_that_waits_for_a_prefix_of_a_running_one_computes_the_prefix_itself_after_a_swap() -> None:
    swapping = Swapping(prefill_chunk=BLOCK)
    swapping.open(PROMPT + PROMPT)
    swapping.steps(1)
    waiting = swapping.open(PROMPT + PROMPT)
    swapping.steps(1)
    kv = swapping.driver.core.kv
    assert waiting not in kv
    swapping.swap().result(0)
    swapping.steps(1)
    assert waiting in kv
    swapping.check()
    assert swapping.heads[1].said


def test_what_a_session_computes_that_had_computed_nothing_at_a_swap_is_found_by_others() -> None:
    swapping = Swapping(prefill_chunk=BLOCK)
    swapping.open(PROMPT[:5])
    swapping.open(PROMPT + PROMPT)
    session = swapping.open(PROMPT[::-1])
    swapping.steps(1)
    assert session in swapping.driver.core.kv
    assert not session.cached
    swapping.swap().result(0)
    swapping.driver.run()
    swapping.open((*PROMPT[::-1], 3))
    swapping.check()
    assert swapping.driver.core.kv.prefixes.counts.hit == 2 * BLOCK


def test_a_tenants_own_head_is_shown_and_forgets_nothing_of_other_tenants() -> None:
    swapping = Swapping(tenant="ann")
    anns, bobs = (9, *PROMPT), PROMPT
    swapping.open(bobs, tenant="bob")
    swapping.open(anns, tenant="ann")
    swapping.driver.run()
    assert swapping.heads[0].said
    assert swapping.heads[0].written == len(anns) + NEW - 1, "the head has filled ann's slots and no others"
    running = swapping.open((*bobs, *bobs), tenant="bob")
    swapping.steps(2)
    swapping.swap().result(0)
    swapping.driver.run()
    counts = swapping.driver.core.kv.prefixes.counts
    found = counts.hit
    swapping.open((*anns, 3), tenant="ann")
    swapping.driver.run()
    assert counts.hit == found
    swapping.open((*running.ids[: 5 * BLOCK], 3), tenant="bob")
    swapping.check()
    assert counts.hit == found + 5 * BLOCK
    assert {ids[: len(anns)] for ids, _ in swapping.heads[1].said} == {anns}


def test_a_swap_of_a_tenants_own_head_takes_no_other_heads_drafts_from_other_tenants() -> None:
    own, others = AttentionHead(layer_of(0)), AttentionHead(layer_of(1))
    own.needs = replace(own.needs, tenant="ann")
    driver = CoreDriver(target(heads=2), {"bigram": own, "jacobi": others})
    driver.open(PROMPT, NEW, sources=("jacobi",), tenant="bob")
    for _ in range(3):
        driver.step()
    said = len(others.said)
    driver.core.apply(SwapProposer("bigram", own, Future()), driver.now)
    driver.step()
    assert len(others.said) == said + 1 > 1


class Resting:
    """Lets the head rest for three steps after each draft, so that passes are shown to it together."""

    left = 0

    def begins(self, *_: object) -> bool:
        begins = not self.left
        self.left = 3 if begins else self.left - 1
        return begins


@pytest.mark.parametrize("rests", [False, True], ids=["awake", "rests"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [256, 16])
def test_drafts_are_a_fresh_sessions_whenever_the_head_is_swapped(
    seed: int, blocks: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rests:
        resting = Resting()
        monkeypatch.setattr(ProposerPrice, "begins", lambda _, *__: resting.begins())
        monkeypatch.setattr(ProposerPrice, "rest_left", property(lambda _: resting.left))
    chance, swapping = random.Random(seed), Swapping(blocks)
    for number in range(8):
        begins = PROMPT[: chance.choice([3, BLOCK, BLOCK + 5, 2 * BLOCK])]
        swapping.open((*begins, chance.randrange(VOCABULARY)), chance.choice([GREEDY, SAMPLED]), number)
        swapping.steps(chance.randrange(6))
        if chance.random() < 0.3:
            swapping.swap().result(0)
    swapping.check()
    assert sum(bool(head.said) for head in swapping.heads) > 1


def test_a_swap_that_comes_during_a_pass_waits_for_its_end() -> None:
    swapping, results = Swapping(), list[Future[BatchedProposer]]()
    swapping.open(PROMPT)
    swapping.driver.step(amid=lambda: results.append(swapping.swap()))
    (swapped,) = results
    assert swapped.result(0) is swapping.heads[0]
    assert not swapping.heads[1].written
    swapping.check()


def begin_waiting(swapping: Swapping) -> Session:
    """Begins a step that waits for a remote source's next draft; returns its session."""
    driver, core = swapping.driver, swapping.driver.core
    session = driver.open(PROMPT, NEW, sources=("bigram",), remote=("drafter",))
    swapping.steps(1)
    fragment = Fragment(2, 1, len(session.ids), prefix_hash(session.ids), (5,), (-1,), (0.5,))
    core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(put=1)), driver.now)
    assert isinstance(core.begin(driver.now), AwaitDrafts), "the source may draft more"
    return session


def test_a_swap_that_comes_while_a_step_waits_for_drafts_waits_for_the_steps_end() -> None:
    swapping = Swapping(wait_ms_most=4.0)
    driver, core = swapping.driver, swapping.driver.core
    begin_waiting(swapping)
    swapped = swapping.swap()
    assert not swapped.done()
    begun = core.begin(driver.now + 1.0)
    assert isinstance(begun, TargetPass)
    core.finish(begun, driver.target.forward(begun.sequences), PassTimes(driver.now, driver.now))
    assert swapped.result(0) is swapping.heads[0]
    assert not swapping.heads[1].written


def test_a_swap_during_a_wait_that_ends_without_a_pass_comes_before_the_next_step() -> None:
    swapping = Swapping(wait_ms_most=4.0)
    driver, core = swapping.driver, swapping.driver.core
    session = begin_waiting(swapping)
    swapped = swapping.swap()
    core.apply(Cancel(session.handle), driver.now)
    assert isinstance(core.begin(driver.now), Idle)
    assert not driver.step()
    assert swapped.result(0) is swapping.heads[0]


def test_a_session_whose_blocks_are_all_full_at_a_swap_is_drafted_for_no_more() -> None:
    swapping = Swapping()
    swapping.open((9,))
    swapping.steps(2)
    swapping.swap().result(0)  # from here on it is noted of each session how much is filled
    session = swapping.open(PROMPT[::-1])
    while session.cached < 2 * BLOCK:
        swapping.steps(1)
    filling = swapping.driver.core.proposers._filling
    assert filling is not None
    assert filling.is_filled(session)
    assert session.cached == 2 * BLOCK
    swapping.swap().result(0)
    assert not filling.is_filled(session)
    swapping.check()
    assert not swapping.heads[2].said


class Counting:
    """A proposer without planes that drafts nothing, and counts how often it is asked to."""

    needs = ProposerNeeds()

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.asked = 0

    def open(self, session: ProposedSession) -> None:
        self.known.add(session.handle)

    def saw(self, seen: SeenPass) -> None:
        assert {shown.handle for shown in seen.rounds} <= self.known

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        self.asked += len(asks)
        return iter(())

    def close(self, handle: int) -> None:
        self.known.remove(handle)


def test_without_planes_new_weights_are_told_of_running_sessions_and_asked_for_them() -> None:
    first, second = Counting(), Counting()
    driver = CoreDriver(None, {"bigram": first})
    session = driver.open(sources=("bigram",))
    for _ in range(3):
        driver.step()
    asked = first.asked
    driver.core.apply(SwapProposer("bigram", second, Future()), driver.now)
    driver.step()
    assert (first.asked, second.asked, second.known) == (asked, 1, {session.handle})


def test_a_swap_that_was_given_up_changes_nothing() -> None:
    swapping, given_up = Swapping(), list[bool]()
    swapping.open(PROMPT)
    swapping.driver.step(amid=lambda: given_up.append(swapping.swap().cancel()))
    assert given_up == [True]
    swapping.check()
    assert swapping.driver.core.proposers.swaps == 0
    assert not swapping.heads[1].written


def failing(swapping: Swapping) -> None:
    swapping.driver.core.proposers.mute("bigram", "it dawdled")


def of_other_needs(swapping: Swapping) -> None:
    swapping.heads[0].needs = ProposerNeeds(layers=LAYERS, planes=((1, 8), (1, 8)))


@pytest.mark.parametrize(("change", "why"), [(failing, "it dawdled"), (of_other_needs, "has other needs")])
def test_what_cannot_take_the_place_is_refused(change: Callable[[Swapping], None], why: str) -> None:
    swapping = Swapping()
    change(swapping)
    with pytest.raises(ValueError, match=why):
        swapping.swap().result(0)
    assert swapping.driver.core.proposers.swaps == 0


def test_an_error_amid_a_swap_reaches_who_awaits_the_swap_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swapping = Swapping()
    swapping.open(PROMPT)
    results = list[Future[BatchedProposer]]()

    def failing(_tenant: str) -> None:
        raise MemoryError("no room for the notes")

    monkeypatch.setattr(swapping.driver.core.kv, "forget", failing)
    with pytest.raises(MemoryError, match="no room"):
        swapping.driver.step(amid=lambda: results.append(swapping.swap()))
    assert isinstance(results[0].exception(0), MemoryError)
