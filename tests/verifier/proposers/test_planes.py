"""A head's own keys and values in planes of the target's pool: its drafts are those of a fresh session."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from attention_head import DEPTH, AttentionHead
from core_driver import GREEDY, SAMPLED, CoreDriver
from plane_target import NEW, PROMPT, fresh, layer_of, plain, target

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.table import SlotTable
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from tests.lm.families import VOCABULARY
from verifier_service.engine.session import Session
from verifier_service.proposers.price import ProposerPrice, ProposerPrices
from verifier_service.sessions.request import SourceSet

LAYER = layer_of(0)
QUIET = 1000
"""Steps of a rest that is long enough for quiet steps."""


class Rest:
    """Decides when the head rests: a number of steps after each of its drafts, or as `on` says."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.on: int | None = None
        """Steps of a rest that lasts until this is changed; 0: the head is awake."""
        self.is_long = False
        """Whether trial after trial has failed, so that the head is shown nothing while it rests."""
        self._left = 0

    @property
    def left(self) -> int:
        return self._left if self.on is None else self.on

    def begins(self, *_: object) -> bool:
        begins = not self.left
        self._left = self.steps if begins else max(0, self._left - 1)
        return begins


@pytest.fixture(autouse=True, params=[0, 3], ids=["awake", "rests"])
def rest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rest:
    rest = Rest(request.param)
    monkeypatch.setattr(ProposerPrice, "begins", lambda _, *__: rest.begins())
    monkeypatch.setattr(ProposerPrice, "rest_left", property(lambda _: rest.left))
    monkeypatch.setattr(ProposerPrices, "rests_long", property(lambda _: rest.is_long and rest.left > 0))
    return rest


class Decoding:
    """Sessions with a head that also drafts what plain decoding gives."""

    def __init__(self, lm: PackedLM | None = None, **limits: Any) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.head = AttentionHead(LAYER, self.truth)
        self.driver = CoreDriver(lm or target(), {"bigram": self.head}, **limits)

    def truth(self, ids: tuple[int, ...]) -> int | None:
        """The right token, two times out of three."""
        for prompt, answer in self.answers.items():
            place = len(ids) - len(prompt)
            if ids[: len(prompt)] == prompt and ids[len(prompt) :] == tuple(answer[:place]):
                return answer[place] if place < len(answer) and len(ids) % 3 else None
        return None

    def open(
        self,
        prompt: Sequence[int],
        new: int = NEW,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        sources: Sequence[str] = ("bigram",),
    ) -> Session:
        self.answers[tuple(prompt)] = plain(prompt, new, params, seed)
        return self.driver.open(prompt, new, params, seed, sources)

    def run(self) -> None:
        self.driver.run()

    def check(self, *sessions: Session) -> None:
        """Ids equal plain decoding's, and every draft so far equals a fresh session's."""
        for session in sessions:
            prompt = tuple(session.ids[: session._request.prompt_length])
            assert self.driver.generated(session) == self.answers[prompt]
        assert not self.driver.core.proposers.muted
        self.check_drafts()

    def check_drafts(self) -> None:
        assert self.head.said
        for ids, said in self.head.said:
            assert said == fresh(LAYER, ids)[: len(said)]
        assert max(len(said) for _, said in self.head.said) == DEPTH
        self.head.said.clear()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_drafts_through_chunks_of_a_prompt_commits_and_rejected_branches(
    params: SamplingParams, static: bool
) -> None:
    decoding = Decoding(target(static=static), prefill_chunk=7)
    sessions = [
        decoding.open(prompt, NEW, params, seed)
        for seed, prompt in enumerate([PROMPT, PROMPT[3:], (1, 2, 3), (7,)])
    ]
    decoding.run()
    decoding.check(*sessions)
    counts = decoding.driver.core.counts["bigram"]
    assert counts.accepted > NEW, "some branches are committed, from behind others"
    assert counts.admitted > 2 * counts.accepted, "others are rejected"


@pytest.mark.parametrize("crowded", [False, True])
def test_drafts_behind_a_prefix_found_again_whose_next_id_is_another(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(target(blocks=14 if crowded else 256))
    copied: list[int] = []
    real = SlotTable.copy_of
    monkeypatch.setattr(
        SlotTable, "copy_of", lambda self, blocks: (copied.extend(blocks), real(self, blocks))[1]
    )
    first = decoding.open(PROMPT)
    decoding.run()
    decoding.check(first)
    assert first.cached > 2 * BLOCK
    before = decoding.head.written
    others = [decoding.open((*PROMPT, next_id)) for next_id in (5, 6)]
    decoding.run()
    decoding.check(*others)
    assert decoding.driver.core.kv.prefixes.counts.hit == 2 * len(PROMPT)
    assert decoding.head.written - before < 2 * (NEW + 2), "the pairs of the prefix are not computed again"
    assert bool(copied) is not crowded, "found blocks are shared where memory is short, else copied"


@pytest.mark.parametrize("blocks", [256, 14], ids=["copied", "shared"])
def test_drafts_behind_a_prefix_that_was_computed_while_the_head_rested(blocks: int, rest: Rest) -> None:
    decoding = Decoding(target(blocks))
    first = decoding.open(PROMPT)
    decoding.driver.step()
    rest.on = 1
    first_turn = decoding.open(PROMPT[::-1])
    while first_turn.cached < 2 * BLOCK:
        decoding.driver.step()
    second_turn = decoding.open((*PROMPT[::-1], 5))
    decoding.driver.step()
    assert decoding.driver.core.kv.prefixes.counts.hit == len(PROMPT)
    rest.on = 0
    decoding.run()
    decoding.check(first, first_turn, second_turn)


def test_drafts_of_a_second_turn_whose_first_ended_while_the_head_rested(rest: Rest) -> None:
    decoding = Decoding()
    other = decoding.open((1, 2, 3), 2 * NEW)
    decoding.driver.step()
    decoding.driver.step()
    rest.on = 1
    first = decoding.open(PROMPT, 2)
    while first.handle in {session.handle for session in decoding.driver.core.sessions}:
        decoding.driver.step()
    decoding.driver.step()
    rest.on = 0
    second = decoding.open((*PROMPT, 5))
    decoding.run()
    decoding.check(other, first, second)


def try_once(decoding: Decoding) -> None:
    """A short session, by which the head has a price for greedy steps."""
    decoding.open((9,), 3)
    decoding.run()


def rest_for_long(decoding: Decoding, rest: Rest, steps: int, *prompts: Sequence[int]) -> list[Session]:
    """Sessions of these prompts, of which this many steps ran during a long rest that then ended."""
    rest.on, rest.is_long = QUIET, True
    sessions = [decoding.open(prompt) for prompt in prompts]
    decoding.driver.step()  # before, the head is shown what was held
    written = decoding.head.written
    for _ in range(steps - 1):
        decoding.driver.step()
    assert decoding.head.written == written
    assert decoding.driver.core.proposers.shows_nothing, "steps are quiet from the second on"
    rest.on, rest.is_long = 0, False
    decoding.head.said.clear()
    return sessions


def test_after_a_long_rest_the_head_drafts_for_sessions_that_have_begun_since(rest: Rest) -> None:
    decoding = Decoding()
    before = decoding.open(PROMPT, 2 * NEW)
    for _ in range(4):
        decoding.driver.step()
    (during,) = rest_for_long(decoding, rest, 3, PROMPT[::-1])
    for _ in range(3):
        decoding.driver.step()
    assert not decoding.head.said, "no session is filled"
    assert decoding.driver.core.proposers.resting("bigram") == {"greedy": True}
    since = decoding.open((7, *PROMPT))
    decoding.run()
    assert {ids[: len(PROMPT) + 1] for ids, _ in decoding.head.said} == {(7, *PROMPT)}
    decoding.check(before, during, since)


@pytest.mark.parametrize("blocks", [256, 14], ids=["copied", "shared"])
def test_behind_a_prefix_that_was_computed_during_a_long_rest_there_are_no_drafts(
    blocks: int, rest: Rest
) -> None:
    decoding = Decoding(target(blocks))
    try_once(decoding)
    (during,) = rest_for_long(decoding, rest, 4, PROMPT)
    behind = decoding.open((*PROMPT, 5))
    decoding.run()
    assert decoding.driver.core.kv.prefixes.counts.hit == len(PROMPT)
    assert not decoding.head.said
    other = decoding.open(PROMPT[::-1])
    decoding.run()
    decoding.check(during, behind, other)


def test_a_prefix_that_was_filled_before_a_long_rest_is_drafted_behind_afterwards(rest: Rest) -> None:
    decoding = Decoding()
    before = decoding.open(PROMPT, 2)
    decoding.run()
    (during,) = rest_for_long(decoding, rest, 4, PROMPT[::-1])
    behind = decoding.open((*PROMPT, 5))
    decoding.run()
    assert decoding.driver.core.kv.prefixes.counts.hit == len(PROMPT)
    decoding.check(before, during, behind)


def test_blocks_of_a_long_rest_are_filled_by_the_sessions_that_get_them_next(rest: Rest) -> None:
    decoding = Decoding(target(blocks=6), reuse_prefixes=False)
    try_once(decoding)
    (during,) = rest_for_long(decoding, rest, 4, PROMPT)
    decoding.run()
    for _ in range(2):
        again = decoding.open(PROMPT)
        decoding.run()
        latest = max(len(ids) for ids, _ in decoding.head.said)
        assert latest >= len(again.ids) - DEPTH - 1, "blocks that are held and hold nothing yet do not count"
        decoding.check(during, again)


def test_a_gap_in_a_block_that_was_filled_so_far_is_noticed(rest: Rest) -> None:
    decoding = Decoding()
    try_once(decoding)
    rest_for_long(decoding, rest, 3, PROMPT[::-1])
    session = decoding.open((7, *PROMPT))
    for _ in range(3):
        decoding.driver.step()
    assert decoding.head.said
    rest_for_long(decoding, rest, 2)
    assert session.cached < 3 * BLOCK, "the block of the drafts"
    decoding.driver.step()
    assert not decoding.head.said


def test_every_block_of_a_long_rest_is_known_to_be_unfilled(rest: Rest) -> None:
    decoding = Decoding()
    try_once(decoding)
    session = decoding.open(PROMPT, 3 * BLOCK)
    for _ in range(3):
        decoding.driver.step()
    before = session.cached
    rest_for_long(decoding, rest, 2 * BLOCK)
    filling = decoding.driver.core.proposers._filling
    assert filling is not None
    since = decoding.driver.core.kv.blocks(session)[before // BLOCK : -(-session.cached // BLOCK)]
    assert len(since) > 2
    assert filling._unfilled == set(since)


def test_a_session_that_got_other_blocks_is_filled_only_if_these_are() -> None:
    decoding = Decoding()
    session = decoding.open(PROMPT)
    for _ in range(3):
        decoding.driver.step()
    kv, filling = decoding.driver.core.kv, decoding.driver.core.proposers._filling
    assert filling is not None
    filling._unfilled = {100}
    assert filling.is_filled(session)
    kv._held[session.handle].table.blocks = [100, *kv.blocks(session)[1:]]
    assert not filling.is_filled(session)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [256, 16])
def test_drafts_are_a_fresh_sessions_however_the_head_rests(seed: int, blocks: int, rest: Rest) -> None:
    dice = random.Random(seed)
    decoding = Decoding(target(blocks), prefill_chunk=9)
    sessions: list[Session] = []
    for _ in range(60):
        if dice.random() < 0.15 and len(sessions) < 9:
            prompt = (*PROMPT[: dice.choice([3, BLOCK, 2 * BLOCK])], len(sessions))
            sessions.append(decoding.open(prompt, dice.randrange(4, NEW), SAMPLED, seed))
        if dice.random() < 0.15:
            rest.on, rest.is_long = dice.choice(
                [(QUIET, True), (1, True), (QUIET, False), (1, False), (0, False), (None, False)]
            )
        decoding.driver.step()
    rest.on, rest.is_long = None, False
    sessions.append(decoding.open(PROMPT[::-1]))
    decoding.run()
    decoding.check(*sessions)


def test_drafts_of_a_second_turn_and_of_a_session_that_found_all_but_its_last_id() -> None:
    decoding = Decoding()
    first = decoding.open(PROMPT)
    decoding.run()
    turn = (*PROMPT, *decoding.driver.generated(first), 9)
    again = decoding.open(turn, 12)
    only_last = decoding.open((*PROMPT, decoding.driver.generated(first)[0]), 12)
    decoding.run()
    decoding.check(first, again, only_last)


def test_drafts_in_blocks_that_a_session_without_the_head_has_filled() -> None:
    decoding = Decoding()
    without = decoding.open(PROMPT, 2, sources=())
    decoding.run()
    assert not decoding.head.said
    named = decoding.open((*PROMPT, 5))
    decoding.run()
    assert decoding.driver.core.kv.prefixes.counts.hit == len(PROMPT)
    decoding.check(without, named)


@pytest.mark.parametrize("longer", [0, 11])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_drafts_after_a_preemption(reuse: bool, static: bool, longer: int, rest: Rest) -> None:
    rest.steps += longer
    decoding = Decoding(target(blocks=12, static=static), reuse_prefixes=reuse, prefill_chunk=20)
    prompts = [tuple(random.Random(seed).choices(range(VOCABULARY), k=20)) for seed in range(4)]
    sessions = [decoding.open(prompt, 36, SAMPLED, seed) for seed, prompt in enumerate(prompts)]
    decoding.run()
    assert decoding.driver.core.totals.preempted > 0
    decoding.check(*sessions)


@pytest.mark.parametrize("same_worker", [False, True])
def test_drafts_after_a_takeover(same_worker: bool) -> None:
    decoding = Decoding()
    answer = plain(PROMPT)
    first = decoding.open(PROMPT)
    while len(first.ids) < len(PROMPT) + BLOCK + 3:
        decoding.driver.step()
    ids = tuple(first.ids)
    decoding.check_drafts()
    later = decoding if same_worker else Decoding()
    if same_worker:
        decoding.driver.core.sessions.park(first)
    second = later.open(ids, len(PROMPT) + NEW - len(ids))
    later.run()
    later.check(second)
    assert [*ids, *later.driver.generated(second)] == [*PROMPT, *answer]
    hit = later.driver.core.kv.prefixes.counts.hit
    assert hit == (3 * BLOCK if same_worker else 0)


def test_drafts_of_a_session_that_names_the_head_late() -> None:
    decoding = Decoding()
    session = decoding.open(PROMPT, sources=())
    for _ in range(4):
        decoding.driver.step()
    session.use_sources(SourceSet(("bigram",), frozenset({1}), frozenset()))
    decoding.run()
    decoding.check(session)


class Dying(AttentionHead):
    """Fails at its second pass."""

    def saw(self, seen: Any) -> None:
        if self.written:
            raise ValueError("a head died")
        super().saw(seen)


def test_a_head_that_dies_leaves_ids_and_prefixes_as_they_are() -> None:
    decoding = Decoding()
    decoding.driver = CoreDriver(target(), {"bigram": Dying(LAYER)})
    first = decoding.open(PROMPT)
    decoding.run()
    again = decoding.open((*PROMPT, 5))
    decoding.run()
    for session, prompt in ((first, PROMPT), (again, (*PROMPT, 5))):
        assert decoding.driver.generated(session) == decoding.answers[prompt]
    assert "a head died" in decoding.driver.core.proposers.muted["bigram"]
    assert decoding.driver.core.kv.prefixes.counts.hit == len(PROMPT)
