"""Who runs, who waits and who gives way, on a virtual clock and a virtual memory."""

from dataclasses import dataclass
from random import Random

import pytest

from verifier_service.engine.scheduler import MemoryFit, Need, Scheduler, fit, may_start


def test_sessions_start_in_the_order_they_came() -> None:
    scheduler = Scheduler(most_running=2)
    for handle in (1, 2, 3):
        scheduler.add(handle)
    for expected in (1, 2):
        assert scheduler.next() == expected
        scheduler.start(expected)
    assert scheduler.next() is None, "two run, and more may not"
    scheduler.remove(1)
    assert scheduler.next() == 3


def test_one_tenant_with_many_sessions_does_not_hold_up_another() -> None:
    scheduler = Scheduler(most_running=8)
    for handle in range(6):
        scheduler.add(handle, tenant="many")
    scheduler.add(9, tenant="one")
    scheduler.start(0)
    assert scheduler.next() == 9


def test_what_has_begun_elsewhere_goes_ahead_of_what_is_new() -> None:
    scheduler = Scheduler(most_running=8)
    scheduler.add(1)
    scheduler.add(2, begun=True)
    assert scheduler.next() == 2


def test_who_gave_way_keeps_its_place() -> None:
    scheduler = Scheduler(most_running=8)
    for handle in (1, 2):
        scheduler.add(handle)
        scheduler.start(handle)
    scheduler.add(3)
    scheduler.preempt(2)
    assert (scheduler.next(), scheduler.waiting) == (2, 2)
    scheduler.start(2)
    assert scheduler.running == [1, 2]


def test_who_is_put_off_lets_others_start_and_keeps_its_place() -> None:
    scheduler = Scheduler(most_running=8)
    for handle in (1, 2, 3):
        scheduler.add(handle)
    scheduler.put_off(1)
    scheduler.put_off(2)
    assert (scheduler.next(), scheduler.waiting, scheduler.in_order) == (3, 3, [1, 2, 3])
    scheduler.reorder([2, 1])
    scheduler.remove(1)
    scheduler.resume(1)
    scheduler.resume(2)
    assert (scheduler.next(), scheduler.waiting) == (2, 2)


def test_removing_an_unknown_session_changes_nothing() -> None:
    scheduler = Scheduler(most_running=1)
    scheduler.add(1)
    scheduler.remove(7)
    assert scheduler.next() == 1


def test_drafts_give_way_before_sessions_do() -> None:
    needs = [Need(1, held=4, bare=1, drafted=2), Need(2, held=4, bare=1, drafted=0)]
    assert fit(needs, available=4) == MemoryFit(True, ())
    assert fit(needs, available=3) == MemoryFit(False, ())


def test_the_youngest_gives_way_first_and_the_oldest_never() -> None:
    needs = [Need(1, held=9, bare=9, drafted=0), Need(2, 3, 1, 0), Need(3, 4, 1, 0)]
    assert fit(needs, available=6).victims == (3,)
    assert fit(needs, available=2).victims == (3, 2)
    assert fit(needs, available=0).victims == (3, 2)


def test_a_session_begins_only_where_it_is_not_sent_away_again() -> None:
    assert may_start(need=4, available=6, running=1)
    assert not may_start(need=4, available=5, running=1)
    assert may_start(need=9, available=0, running=0)


@dataclass
class Job:
    """A session in a virtual memory of blocks of one id."""

    prompt: int
    length: int
    done: int = 0
    held: int = 0


def play(seed: int, memory: int) -> tuple[int, int]:
    """Runs sessions to their ends; returns steps taken and how often somebody gave way."""
    random = Random(seed)
    jobs = {n: Job(random.randint(1, memory // 2), random.randint(1, memory // 2)) for n in range(12)}
    arrivals = {n: random.randint(0, 30) for n in jobs}
    scheduler = Scheduler(most_running=5)
    steps = given_way = 0
    while jobs:
        assert steps < 5000, f"{len(jobs)} sessions never end"
        for handle in [n for n, at in arrivals.items() if at == steps]:
            scheduler.add(handle, tenant=str(handle % 2))
        while (handle := scheduler.next()) is not None:
            free = memory - sum(job.held for job in jobs.values())
            job = jobs[handle]
            if not may_start(job.prompt + job.done + 1, free, len(scheduler.running)):
                break
            scheduler.start(handle)
            job.held = job.prompt + job.done
        running = scheduler.running
        free = memory - sum(job.held for job in jobs.values())
        needs = [Need(n, jobs[n].held, bare=1, drafted=random.randint(0, 3)) for n in running]
        found = fit(needs, free)
        assert not running or running[0] not in found.victims
        for victim in found.victims:
            given_way += 1
            scheduler.preempt(victim)
            jobs[victim].held = 0
        for handle in scheduler.running:
            job = jobs[handle]
            job.held, job.done = job.held + 1, job.done + 1
            if job.done == job.length:
                scheduler.remove(handle)
                del jobs[handle]
        assert sum(job.held for job in jobs.values()) <= memory
        steps += 1
    return steps, given_way


@pytest.mark.parametrize("seed", range(30))
def test_every_session_comes_to_its_end_within_memory(seed: int) -> None:
    play(seed, memory=40)


def test_sessions_do_give_way_in_such_plays() -> None:
    assert sum(play(seed, memory=40)[1] for seed in range(30)) > 10
