"""Sessions from a lost verifier: in which order they are read, and how long they wait for it."""

import random
import statistics
from collections.abc import Sequence
from itertools import permutations

import pytest
from core_driver import GREEDY, CoreDriver

from outrider.lm.kv.blocks import BLOCK
from speculative.reading_order import UnreadPrompt, reading_order
from verifier_service.engine import session_pool
from verifier_service.engine.session import Session

SHARED = tuple(place * 7 % 24 for place in range(25 * BLOCK))


def prompt(handle: int, blocks: str, rest: int = 1) -> UnreadPrompt:
    return UnreadPrompt(handle, [letter.encode() for letter in blocks], rest)


def waits(prompts: Sequence[UnreadPrompt]) -> int:
    """Sum of the tokens that are read until each session is served; blocks are read once."""
    read: set[tuple[bytes, ...]] = set()
    now = total = 0
    for each in prompts:
        for length in range(1, len(each.blocks) + 1):
            beginning = tuple(each.blocks[:length])
            now += BLOCK * (beginning not in read)
            read.add(beginning)
        now += each.rest
        total += now
    return total


def test_many_with_one_beginning_go_before_few_with_their_own() -> None:
    asked = [prompt(1, "xyz"), prompt(2, "abc"), prompt(3, "abd"), prompt(4, "abe"), prompt(5, "uvwx")]
    assert reading_order(asked, BLOCK) == [2, 3, 4, 1, 5]


def test_equals_are_read_in_order_of_arrival_and_short_ones_first() -> None:
    assert reading_order([prompt(7, "ab"), prompt(3, "cd"), prompt(5, "ef")], BLOCK) == [7, 3, 5]
    assert reading_order([prompt(1, "abcd"), prompt(2, "", 5), prompt(3, "e")], BLOCK) == [2, 3, 1]
    assert reading_order([], BLOCK) == []


def test_one_prompt_that_begins_another_is_read_on_the_way() -> None:
    assert reading_order([prompt(1, "abcdef"), prompt(2, "xy"), prompt(3, "ab")], BLOCK) == [2, 3, 1]


def test_thousands_of_prompts_that_each_begin_the_next_are_put_in_order() -> None:
    asked = [prompt(length, "a" * length) for length in range(2000, 0, -1)]
    assert reading_order(asked, BLOCK) == list(range(1, 2001))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_order_has_a_smaller_sum_of_waits(seed: int) -> None:
    dice = random.Random(seed)
    asked = [
        prompt(handle, "".join(dice.choice("ab") for _ in range(dice.randint(0, 5))), dice.randint(1, BLOCK))
        for handle in range(6)
    ]
    order = reading_order(asked, BLOCK)
    assert sorted(order) == list(range(6))
    assert waits([asked[handle] for handle in order]) == min(map(waits, permutations(asked)))


def recover(prompts: Sequence[tuple[int, ...]]) -> tuple[list[list[int]], list[int]]:
    """Ids of each session that came from a lost verifier, and the rows computed before its first token."""
    driver = CoreDriver(prefill_chunk=64)
    driver.open((3, 1, 2), params=GREEDY, new=400)
    sessions = [driver.open(ids, params=GREEDY, new=3, recovered=True) for ids in prompts]
    first: dict[int, int] = {}
    while driver.step() and len(first) < len(sessions):
        done = {session.handle for session in sessions if driver.generated(session)}
        first |= dict.fromkeys(done - first.keys(), sum(it.rows for it in driver.passes))
    driver.run()
    return [driver.generated(session) for session in sessions], [first[it.handle] for it in sessions]


def own(number: int, length: int) -> tuple[int, ...]:
    dice = random.Random(number)
    return tuple(dice.randrange(24) for _ in range(length))


def test_half_the_sessions_wait_half_as_long_and_get_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [
        (*SHARED, *own(number, 3 * BLOCK)) if number % 8 > 2 else own(number, 28 * BLOCK)
        for number in range(16)
    ]
    ids, planned = recover(prompts)
    by_arrival = lambda unread, _: [each.handle for each in unread]  # noqa: E731
    monkeypatch.setattr(session_pool, "reading_order", by_arrival)
    same, arrived = recover(prompts)
    assert ids == same
    assert 2 * statistics.median(planned) <= statistics.median(arrived)
    assert max(planned) <= 1.05 * max(arrived)


def test_a_session_that_is_read_already_keeps_its_place() -> None:
    driver = CoreDriver(prefill_chunk=64)
    long: Session = driver.open(own(1, 100), new=50, recovered=True)
    for _ in range(4):
        driver.step()
    assert long.uncomputed == 1
    driver.open(own(2, 40), recovered=True)
    driver.open(own(3, 20), recovered=True)
    driver.step()
    assert driver.core.sessions.scheduler.running == [1, 3, 2]
