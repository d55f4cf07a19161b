"""Clients share the memory for bodies and the processes that read them."""

import pytest

from orchestrator.front.http.bodies.fair_queue import FairQueue
from orchestrator.front.http.bodies.memory import FREE_BYTES, BodyMemory
from speculative.errors import Overloaded

MIB = 2**20


def test_one_owner_holds_at_most_half_of_the_memory() -> None:
    memory = BodyMemory(100 * MIB)
    with memory.held("a") as first, memory.held("a") as second, memory.held("b") as other:
        first.grow(50 * MIB)
        with pytest.raises(Overloaded):
            second.grow(MIB)
        other.grow(25 * MIB)
        with pytest.raises(Overloaded):
            other.grow(26 * MIB)


def test_memory_comes_back_when_a_body_is_read_or_refused() -> None:
    memory = BodyMemory(100 * MIB)
    with memory.held("a") as held:
        held.grow(50 * MIB)
        held.release()
        with memory.held("a") as again:
            again.grow(50 * MIB)
    with memory.held("a") as held:
        held.grow(50 * MIB)


def test_a_body_that_grows_is_charged_once_and_small_bodies_are_not() -> None:
    memory = BodyMemory(10 * MIB)
    with memory.held("a") as held:
        for size in range(MIB, 6 * MIB, MIB):
            held.grow(size)
        with memory.held("a") as small:
            small.grow(FREE_BYTES)
            with pytest.raises(Overloaded):
                small.grow(FREE_BYTES + MIB)


def test_owners_take_turns_however_much_one_has_queued() -> None:
    queue: FairQueue[int] = FairQueue(most=10, most_each=2)
    for item in range(4):
        queue.put("a", item)
    queue.put("b", 9)
    taken = []
    while item_taken := queue.take():
        taken.append(item_taken)
        queue.done(item_taken[0])
    assert taken == [("a", 0), ("b", 9), ("a", 1), ("a", 2), ("a", 3)]


def test_an_owner_leaves_a_place_to_others() -> None:
    queue: FairQueue[int] = FairQueue(most=10, most_each=1)
    queue.put("a", 1)
    queue.put("a", 2)
    assert queue.take() == ("a", 1)
    assert queue.take() is None, "the second waits for the first, though nobody else wants the place"
    queue.put("b", 3)
    assert queue.take() == ("b", 3)
    queue.done("a")
    assert queue.take() == ("a", 2)


def test_a_full_queue_refuses_and_one_owner_fills_half_of_it() -> None:
    queue: FairQueue[int] = FairQueue(most=4, most_each=1)
    queue.put("a", 1)
    queue.put("a", 2)
    with pytest.raises(Overloaded):
        queue.put("a", 3)
    queue.put("b", 3)
    queue.put("c", 4)
    with pytest.raises(Overloaded, match="4 large bodies wait"):
        queue.put("d", 5)
    assert len(queue) == 4
