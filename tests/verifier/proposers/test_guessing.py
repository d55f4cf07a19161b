"""Jacobi, Lookahead and Token Recycling: ids stay the target's, and drafts are what the papers say."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from ngram_lm import NgramLM

from outrider.lm.kv.blocks import BLOCK
from speculative.hashing import prefix_hash
from speculative.noise import gumbel
from speculative.observed import Observed, OffPathRow, TopIds
from speculative.params import SamplingParams
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ScoutAsk,
    SeenPass,
    SeenRound,
)
from verifier_service.proposers.hit_rates import HitRates, ScoutWorth
from verifier_service.proposers.jacobi import JacobiProposer
from verifier_service.proposers.lookahead import LookaheadProposer, NGramPool
from verifier_service.proposers.recycling import RecyclingProposer
from verifier_service.proposers.scouting import CommittedHash, said_after

PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
MAKE: dict[str, Callable[[], BatchedProposer]] = {
    "jacobi": JacobiProposer,
    "lookahead": LookaheadProposer,
    "recycling": RecyclingProposer,
}


class Cycling(NgramLM):
    """A target whose greedy text repeats some ids from 3 on without end."""

    def __init__(self, period: int) -> None:
        super().__init__(16)
        self._last = 2 + period

    def logits(self, context: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        row = np.zeros(self.vocabulary_size, np.float32)
        row[context[-1] + 1 if 3 <= context[-1] < self._last else 3] = 12
        return row


PERIOD = {"jacobi": 1, "lookahead": 6, "recycling": 6}
"""Jacobi's guesses stay one place behind in a text in which each token depends on the last one alone."""


def decoded(
    make: Callable[[], NgramLM],
    name: str,
    requests: Sequence[tuple[tuple[int, ...], SamplingParams]],
    new: int = 60,
) -> tuple[list[list[int]], CoreDriver]:
    driver = CoreDriver(make(), {name: MAKE[name]()} if name else {})
    sessions = [
        driver.open(prompt, new, params, seed=at, sources=(name,) if name else (), node_limit=12)
        for at, (prompt, params) in enumerate(requests)
    ]
    driver.run()
    assert not driver.core.proposers.muted
    return [driver.generated(session) for session in sessions], driver


def asked(proposer: BatchedProposer, handle: int, node_limit: int = 16) -> DraftLevel:
    ((level,),) = proposer.draft([DraftAsk(handle, node_limit)])
    assert level is not None
    return level


def session(
    handle: int,
    ids: list[int],
    tenant: str = "",
    learn: bool = False,
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> ProposedSession:
    return ProposedSession(handle, tenant, learn, ids, len(ids), 100, params, seed)


def shown(
    proposer: BatchedProposer, ids: list[int], tokens: tuple[int, ...], rows: dict[tuple[int, ...], int]
) -> None:
    """Commits tokens to session 1; `rows` is what the target said behind paths off the accepted one."""
    off_path = [
        OffPathRow(prefix_hash([*ids, *path]), path[-1], said, (said,)) for path, said in rows.items()
    ]
    position = len(ids)
    ids += tokens
    said = Observed(1, tuple(TopIds((token,), (-0.1,)) for token in tokens), tuple(off_path))
    proposer.saw(SeenPass((SeenRound(1, position, tokens, said, 0, ()),), None))


@pytest.mark.parametrize("name", MAKE)
def test_ids_equal_plain_decoding_in_a_batch(name: str) -> None:
    requests = [((1, 2, 3), GREEDY), ((4, 5), SAMPLED), ((1, 2, 3), PENALISED), ((5,), SAMPLED)]
    for width in (6, 24):
        plain, _ = decoded(lambda width=width: NgramLM(width), "", requests)
        ids, driver = decoded(lambda width=width: NgramLM(width), name, requests)
        assert ids == plain
        assert driver.core.counts[name].kept > 0


@pytest.mark.parametrize("name", MAKE)
def test_ids_equal_plain_decoding_through_preemptions_and_prefixes_found_again(name: str) -> None:
    rng = random.Random(4)
    prompts = [tuple(rng.choices(range(12), k=20)) for _ in range(4)]
    plain, _ = decoded(lambda: NgramLM(12), "", [(prompt, SAMPLED) for prompt in prompts], new=36)
    driver = CoreDriver(NgramLM(12, slots=12 * BLOCK), {name: MAKE[name]()}, prefill_chunk=20)
    sessions = [
        driver.open(prompt, 36, SAMPLED, seed=at, sources=(name,)) for at, prompt in enumerate(prompts)
    ]
    driver.run()
    assert driver.core.totals.preempted > 0
    turn = (*prompts[0], *plain[0], 5)
    (after,), _ = decoded(lambda: NgramLM(12), "", [(turn, SAMPLED)], new=30)
    again = driver.open(turn, 30, SAMPLED, sources=(name,))
    driver.run()
    assert driver.core.kv.prefixes.counts.hit > 0
    assert [driver.generated(session) for session in (*sessions, again)] == [*plain, after]
    assert not driver.core.proposers.muted
    counts = driver.core.counts[name]
    assert counts.admitted > counts.accepted > 0, "some drafts are right, others are dropped"


@pytest.mark.parametrize("name", MAKE)
def test_a_text_that_repeats_takes_fewer_steps(name: str) -> None:
    requests = [((1, 2, 3), GREEDY), ((6, 7), GREEDY)]
    plain, before = decoded(lambda: Cycling(PERIOD[name]), "", requests)
    ids, driver = decoded(lambda: Cycling(PERIOD[name]), name, requests)
    assert ids == plain
    assert driver.core.counts[name].accepted > 20
    assert driver.core.totals.steps < 0.8 * before.core.totals.steps


def test_what_the_target_says_behind_a_wrong_guess_is_the_next_guess() -> None:
    proposer, ids = JacobiProposer(places=3), [7, 5]
    proposer.open(session(1, ids))
    level = asked(proposer, 1)
    assert level.scouts is not None
    assert level.scouts.tokens == (5, 5, 5)
    assert level.scouts.parents == (-1, 0, 1)
    shown(proposer, ids, (6,), {(5,): 8, (5, 5): 9, (5, 5, 5): 4})
    level = asked(proposer, 1)
    assert level.scouts is not None
    assert level.scouts.tokens == (8, 9, 4)
    assert level.tokens == level.scouts.tokens[: len(level.tokens)], "likely guesses are drafted as well"
    shown(proposer, ids, (8, 2), {(8, 9): 3})
    level = asked(proposer, 1)
    assert level.scouts is not None
    assert level.scouts.tokens == (3, 3, 3), "shifted by two; a place without a guess repeats the last"


def test_guesses_shrink_with_the_node_limit() -> None:
    proposer = JacobiProposer(places=3)
    proposer.open(session(1, [5]))
    level = asked(proposer, 1, node_limit=0)
    assert level == DraftLevel((), (), (), None)


def test_the_scouts_of_a_window_are_a_comb_and_complete_ngrams_are_drafted() -> None:
    proposer, ids = LookaheadProposer(window=2, size=3), [4, 5]
    proposer.open(session(1, ids))
    level = asked(proposer, 1)
    assert level.scouts == ScoutAsk((4, 5), (-1, 0), level.scouts.worth if level.scouts else ())
    shown(proposer, ids, (7,), {(4,): 8, (4, 5): 9})
    level = asked(proposer, 1)
    assert level.scouts is not None
    assert level.scouts.tokens == (4, 8, 5, 9)
    assert level.scouts.parents == (-1, 0, 0, 2), "each column hangs below its own first token"
    shown(proposer, ids, (4,), {(4,): 1, (4, 8): 6, (4, 5): 1, (4, 5, 9): 2})
    level = asked(proposer, 1)
    assert (level.tokens, level.parents) == ((8, 6), (-1, 0)), "the n-gram (4, 8, 6) goes on"
    assert level.scouts is not None
    assert level.scouts.tokens == (8, 6, 9, 2)
    level = asked(proposer, 1, node_limit=3)
    assert level.scouts is not None
    assert level.scouts.tokens == (8, 6), "whole columns alone"


def test_a_pool_keeps_the_ngrams_that_were_met_last() -> None:
    pool = NGramPool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert list(pool.after(1)) == [(6, 7), (2, 3)]
    assert not pool.after(9)


def test_recycling_drafts_what_was_likely_after_a_token_whether_it_was_chosen_or_not() -> None:
    proposer, ids = RecyclingProposer(), [5, 9]
    proposer.open(session(1, ids))
    said = Observed(2, (TopIds((9, 6), (-0.1, -2.0)),), (OffPathRow(0, 9, 8, (8, 7)),))
    proposer.saw(SeenPass((SeenRound(1, 1, (9,), said, 0, ()),), None))
    (level,) = (level for (level,) in proposer.draft([DraftAsk(1, 8)]))
    assert level is not None
    assert level.tokens == (8, 7)
    ids.append(5)
    levels = [level for (level,) in proposer.draft([DraftAsk(1, 3)]) if level]
    assert [level.tokens for level in levels] == [(9, 6), (8,)]
    assert levels[1].parents == (0,)


@pytest.mark.parametrize(
    ("tenant", "learn", "known"),
    [("a", True, True), ("b", True, False), ("a", False, False)],
    ids=["of the tenant", "of another", "one that may not learn"],
)
def test_only_sessions_of_a_tenant_that_learn_share_a_table(tenant: str, learn: bool, known: bool) -> None:
    proposer = RecyclingProposer()
    proposer.open(session(1, [5, 9], "a", learn=True))
    said = Observed(2, (TopIds((9, 6), (-0.1, -2.0)),), (OffPathRow(0, 9, 8, (8, 7)),))
    proposer.saw(SeenPass((SeenRound(1, 1, (9,), said, 0, ()),), None))
    proposer.close(1)
    proposer.open(session(2, [9], tenant, learn))
    assert bool(list(proposer.draft([DraftAsk(2, 8)]))) == known


@pytest.mark.parametrize("name", ["jacobi", "lookahead"])
def test_nothing_of_one_session_is_drafted_for_another(name: str) -> None:
    used, fresh = MAKE[name](), MAKE[name]()
    driver = CoreDriver(Cycling(PERIOD[name]), {name: used})
    driver.open((3, 4), 40, sources=(name,), tenant="a", learn=True)
    driver.run()
    assert driver.core.counts[name].accepted > 10
    levels = []
    for proposer in (used, fresh):
        proposer.open(session(9, [3, 4], "a", learn=True))
        levels.append(asked(proposer, 9))
    assert all(level.scouts is not None for level in levels)
    assert levels[0].scouts._replace(worth=()) == levels[1].scouts._replace(worth=())
    assert set(levels[0].tokens) <= {4}, "the session's own last token is all it has"


def test_recycled_ids_are_ranked_by_the_noise_of_their_position() -> None:
    names = (3, 4, 5, 6)
    firsts = []
    for seed in range(12):
        proposer = RecyclingProposer()
        ids = [9]
        proposer.open(session(1, ids, params=SAMPLED, seed=seed))
        said = Observed(4, (TopIds((9,), (-0.1,)),), (OffPathRow(0, 9, 3, names),))
        proposer.saw(SeenPass((SeenRound(1, 1, (9,), said, 0, ()),), None))
        level = next(iter(proposer.draft([DraftAsk(1, 8)])))[0]
        assert level is not None
        noise = gumbel(seed, 1, 16)
        shares = np.log([0.4, 0.12, 0.06, 0.04])
        firsts.append(level.tokens[0])
        assert level.tokens[0] == names[int((shares + noise[list(names)]).argmax())]
    assert len(set(firsts)) > 1, "the noise decides, not the rank alone"


def test_scouts_are_weighed_by_what_they_gained_and_tried_again_after_a_rest() -> None:
    worth = ScoutWorth(0.2)
    assert worth.each == pytest.approx(0.2)
    for _ in range(200):
        worth.learn(rows=8, gained=0)
    low = worth.each
    assert low < 0.01
    for _ in range(63):
        worth.learn(rows=0, gained=0)
    assert worth.each == low
    worth.learn(rows=0, gained=0)
    assert worth.each == pytest.approx(0.2)
    for _ in range(200):
        worth.learn(rows=1, gained=1)
    assert 0.9 < worth.each <= 1.0


@pytest.mark.parametrize("name", ["jacobi", "lookahead"])
def test_scouts_that_do_not_pay_are_no_longer_computed(name: str) -> None:
    costs = StepCostModel({1: 20.0, 2: 25.0, 64: 335.0})
    driver = CoreDriver(NgramLM(200), {name: MAKE[name]()}, costs=costs, adaptive=True)
    driver.open((1, 2, 3), 90, SAMPLED, sources=(name,))
    driver.run()
    assert sum(len(begun.parts[0][1].scouts.tokens) for begun in driver.passes[60:]) == 0


def test_hit_rates_follow_what_happens() -> None:
    rates = HitRates([0.5, 0.5])
    for _ in range(300):
        rates.learn(0, hit=True)
        rates.learn(1, hit=False)
    assert rates[0] > 0.95
    assert rates[1] < 0.05


def test_the_hash_of_a_sessions_tokens_follows_them() -> None:
    ids = [4, 5]
    hashes = CommittedHash(ids)
    ids += [6, 7, 8]
    assert hashes.at(3) == prefix_hash([4, 5, 6])
    assert hashes.at(5) == prefix_hash(ids)
    said = said_after(prefix_hash([4]), SeenRound(1, 1, (5, 6), None, 0, ()))
    assert said == {prefix_hash([4]): 5, prefix_hash([4, 5]): 6}
