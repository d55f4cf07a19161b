"""Prompts that are read together: who waits for whom, and that each answer is the one it would be alone."""

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver

from speculative.params import SamplingParams

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
