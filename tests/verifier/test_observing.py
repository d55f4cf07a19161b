"""What the target said at verified rows, on the accepted path and off it, for sources that ask."""

import numpy as np
import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver

from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.noise import NoiseRows
from speculative.observed import Observed
from speculative.params import SamplingParams
from verifier_service.engine.messages import InFlight, Observe, Offers, Sources
from verifier_service.engine.session import Session
from verifier_service.sessions.request import SourceSet

PROMPT = (4, 5, 6)
FAR = SourceSet(("far",), frozenset(), frozenset({1}))
NEW = 10


def plain(params: SamplingParams) -> list[int]:
    driver = CoreDriver()
    session = driver.open(PROMPT, NEW, params, seed=3)
    driver.run()
    return driver.generated(session)


def listening(driver: CoreDriver, params: SamplingParams, tops: int = 4, new: int = NEW) -> Session:
    session = driver.open(PROMPT, new, params, seed=3)
    driver.core.apply(Sources(session.handle, FAR), driver.now)
    if tops:
        driver.core.apply(Observe(session.handle, 1, tops), driver.now)
    return session


def offer(driver: CoreDriver, session: Session, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    survival = tuple(0.9 for _ in tokens)
    base = prefix_hash(session.ids)
    fragment = Fragment(1, 1, len(session.ids), base, tokens, parents, survival)
    driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(put=1)), driver.now)


def last_observed(driver: CoreDriver) -> Observed | None:
    driver.updates += driver.core.collect().updates
    return driver.updates[-1].observed


def likeliest(driver: CoreDriver, ids: list[int], count: int) -> tuple[int, ...]:
    return tuple(np.argsort(-driver.target.logits(ids), kind="stable")[:count].tolist())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_likeliest_ids_and_the_token_of_every_verified_row_are_known(params: SamplingParams) -> None:
    expected = plain(params)
    driver = CoreDriver()
    session = listening(driver, params)
    driver.step()
    ids = list(session.ids)
    right, wrong = expected[1], (expected[1] + 1) % 24
    offer(driver, session, (right, wrong, 7), (-1, -1, 1))
    driver.step()
    said = last_observed(driver)
    assert said is not None
    assert session.ids[len(ids) :] == expected[1:3]
    assert [top.ids for top in said.tops] == [
        likeliest(driver, ids, 4),
        likeliest(driver, [*ids, right], 4),
    ]
    row = driver.target.logits(ids).astype(np.float64)
    logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    assert said.tops[0].logprobs == pytest.approx([logprobs[id_] for id_ in said.tops[0].ids], abs=1e-5)
    noise = NoiseRows(3, 24)
    for path, found in zip(([wrong], [wrong, 7]), said.off_path, strict=True):
        prefix = [*ids, *path]
        scores = driver.target.logits(prefix).astype(np.float64)
        if not params.greedy:
            scores = scores / params.temperature + noise.at(len(prefix)).full()
        assert found.prefix_hash == prefix_hash(prefix)
        assert (found.last, found.token) == (path[-1], int(scores.argmax()))
        assert found.top_ids == likeliest(driver, prefix, 4)


def test_nothing_is_collected_where_no_source_asks_and_nothing_changes_where_one_does() -> None:
    expected = plain(SAMPLED)
    for tops in (0, 3, 32):
        driver = CoreDriver()
        session = listening(driver, SAMPLED, tops)
        for _ in range(3):
            driver.step()
            offer(driver, session, (1, 2), (-1, -1))
        driver.run()
        assert driver.generated(session) == expected
        observed = [update.observed for update in driver.updates if update.ids]
        assert all((said is None) == (tops == 0) for said in observed[:3])
        for update in driver.updates:
            if update.observed is not None:
                assert update.observed.count == min(tops, 24)
                assert len(update.observed.tops) == len(update.ids)


def test_a_source_that_is_no_longer_used_is_told_nothing() -> None:
    driver = CoreDriver()
    session = listening(driver, GREEDY)
    driver.step()
    assert last_observed(driver) is not None
    driver.core.apply(Sources(session.handle, SourceSet(("far",), frozenset(), frozenset())), driver.now)
    driver.step()
    assert last_observed(driver) is None


def test_a_source_that_rests_costs_nothing() -> None:
    driver = CoreDriver()
    session = listening(driver, SAMPLED, new=100)
    while not session.sources.resting:
        assert driver.step(lambda: offer(driver, session, (1, 2), (-1, -1)))
    assert session.sources.tops == 0
    driver.step()
    assert last_observed(driver) is None
