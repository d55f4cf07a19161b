"""Prompts that are read together: who waits for whom, and that each answer is the one it would be alone."""

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver

from speculative.params import SamplingParams
from verifier_service.engine.messages import Cancel
from verifier_service.engine.session import Session

LONG = tuple(place * 7 % 24 for place in range(600))
SHORT = tuple(place * 5 % 24 for place in range(20))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_another_tenant_s_short_prompt_is_answered_while_a_long_one_is_read(params: SamplingParams) -> None:
    driver = CoreDriver(prefill_chunk=64, reuse_prefixes=False)
    long = driver.open(LONG, params=params, tenant="a")
    others = [driver.open((1, 2, 3 + number), params=params, tenant="a") for number in range(20)]
    short = driver.open(SHORT, params=params, tenant="b")
    for _ in range(3):
        driver.step()
    assert driver.generated(short)
    assert not driver.generated(long)
    driver.run()
    for session, prompt in ((long, LONG), (short, SHORT), (others[-1], (1, 2, 22))):
        alone = CoreDriver(prefill_chunk=64, reuse_prefixes=False)
        single = alone.open(prompt, params=params)
        alone.run()
        assert driver.generated(session) == alone.generated(single)


def test_who_waits_for_a_prompt_that_another_session_reads_holds_nobody_up() -> None:
    """Sessions of one tenant that begin alike wait for the first of them; a session behind them must not."""
    driver = CoreDriver(prefill_chunk=16)
    running = driver.open((1, 2, 3), tenant="b", new=400)
    driver.step()
    alike = [driver.open((*LONG, number), tenant="a", new=20) for number in range(12)]
    later = driver.open(SHORT, tenant="b", new=20)
    begun: list[int] = []
    begin = driver.core.kv.begin

    def counted(session: Session) -> bool:
        begun.append(session.handle)
        return begin(session)

    driver.core.kv.begin = counted  # type: ignore[method-assign]
    for _ in range(6):
        driver.step()
    assert driver.generated(later)
    assert driver.core.sessions.scheduler.waiting == 11
    assert not any(driver.generated(session) for session in alike)
    driver.run()
    assert len(begun) <= 2 * len(alike) + 1, "who waits is not asked again at every step"
    for session, prompt, new in ((running, (1, 2, 3), 400), (later, SHORT, 20), (alike[-1], (*LONG, 11), 20)):
        alone = CoreDriver(prefill_chunk=16)
        single = alone.open(prompt, new=new)
        alone.run()
        assert driver.generated(session) == alone.generated(single)


def test_who_waits_for_a_prompt_goes_on_where_its_reader_leaves() -> None:
    driver = CoreDriver(prefill_chunk=16)
    first, second = (driver.open((*LONG, number), tenant="a") for number in range(2))
    for _ in range(3):
        driver.step()
    driver.core.apply(Cancel(first.handle), driver.now)
    driver.run()
    alone = CoreDriver(prefill_chunk=16)
    single = alone.open((*LONG, 1))
    alone.run()
    assert driver.generated(second) == alone.generated(single)
