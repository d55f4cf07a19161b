"""Names that stand for several addresses: which are dialled, which are dropped, and when."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.peers import PeerChanges, PeerSet, peer_changes
from orchestrator.fleet.verifier_link import Patience
from outrider.runtime.resolving import resolve
from speculative.errors import Unavailable

NAME = "dns:verifiers.test:50051"
addresses = st.sampled_from(("a:1", "b:1", "c:1", "d:1"))


class ToyLink:
    """A link that runs until it is cancelled; `runs` says whether it does."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sessions = 0
        self.runs = False

    async def run(self) -> None:
        self.runs = True
        try:
            await asyncio.Event().wait()
        finally:
            self.runs = False


class Resolver:
    """Stands for the name service: answers with `found`, or raises it."""

    def __init__(self, *found: str) -> None:
        self.found: Sequence[str] | Exception = found
        self._asked = asyncio.Condition()

    async def __call__(self, peer: str) -> Sequence[str]:
        async with self._asked:
            self._asked.notify_all()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def again(self) -> None:
        """Waits until the name was resolved again and the answer applied."""
        async with asyncio.timeout(60), self._asked:
            await self._asked.wait()
            await self._asked.wait()


def links(resolver: Resolver, *peers: str) -> PeerSet[ToyLink]:
    return PeerSet(peers, ToyLink, every_s=0.001, resolve=resolver)


def test_a_link_with_sessions_leaves_and_one_without_goes() -> None:
    assert peer_changes({"a:1": 2, "b:1": 0, "c:1": 1}, ["c:1", "d:1"]) == PeerChanges(
        ("d:1",), ("a:1",), ("b:1",)
    )


@given(st.dictionaries(addresses, st.integers(0, 2)), st.lists(addresses))
def test_what_is_held_and_what_is_wanted_meet(held: dict[str, int], wanted: list[str]) -> None:
    todo = peer_changes(held, wanted)
    after = set(held) | set(todo.added)
    assert not set(todo.added) & set(held)
    assert after - set(todo.leaving) - set(todo.gone) == set(wanted)
    assert all(held[address] for address in todo.leaving)
    assert not any(held[address] for address in todo.gone)


async def test_addresses_that_a_name_gains_are_dialled_and_those_it_loses_are_hung_up_on() -> None:
    resolver = Resolver("a:1", "b:1")
    held = links(resolver, NAME, "fixed:1")
    assert list(held.by_address) == ["fixed:1"]
    held.start()
    await resolver.again()
    assert set(held.by_address) == {"fixed:1", "a:1", "b:1"}
    first = held.by_address["a:1"]
    assert first.runs
    resolver.found = ("b:1", "c:1")
    await resolver.again()
    assert set(held.by_address) == {"fixed:1", "b:1", "c:1"}
    assert not first.runs
    rest = list(held.by_address.values())
    await held.stop()
    assert not any(link.runs for link in rest)


async def test_a_link_with_sessions_is_kept_until_they_end_but_gets_no_more() -> None:
    resolver = Resolver("a:1", "b:1")
    held = links(resolver, NAME)
    held.start()
    await resolver.again()
    busy = held.by_address["a:1"]
    busy.sessions = 1
    resolver.found = ("b:1",)
    await resolver.again()
    assert busy.runs
    assert [link.address for link in held.staying] == ["b:1"]
    busy.sessions = 0
    await resolver.again()
    assert not busy.runs
    await held.stop()


async def test_one_that_comes_back_before_it_was_let_go_stays() -> None:
    resolver = Resolver("a:1")
    held = links(resolver, NAME)
    held.start()
    await resolver.again()
    busy = held.by_address["a:1"]
    busy.sessions = 1
    resolver.found = ()
    await resolver.again()
    assert held.staying == []
    resolver.found = ("a:1",)
    await resolver.again()
    assert held.staying == [busy]
    await held.stop()


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("label too long")])
async def test_a_resolver_that_fails_changes_nothing_and_says_so_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver("a:1")
    held = links(resolver, NAME)
    assert held.unknown == [NAME]
    held.start()
    await resolver.again()
    resolver.found = error
    await resolver.again()
    await resolver.again()
    assert list(held.by_address) == ["a:1"]
    assert held.unknown == []
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == ["not resolved"]
    resolver.found = ("b:1",)
    await resolver.again()
    assert list(held.by_address) == ["b:1"]
    await held.stop()


async def test_a_fault_is_told_and_the_name_is_followed_further(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver("a:1")
    held = links(resolver, NAME)
    held.start()
    await resolver.again()
    resolver.found = RuntimeError("a fault")
    await resolver.again()
    assert list(held.by_address) == ["a:1"]
    resolver.found = ("b:1",)
    await resolver.again()
    assert list(held.by_address) == ["b:1"]
    assert {one.message for one in caplog.records if one.levelname == "ERROR"} == {
        "peers were not brought up to date"
    }
    await held.stop()


class SlowToEnd(ToyLink):
    """A link that takes its time to hang up, and sets `ending` when it begins to."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.ending = asyncio.Event()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.ending.set()
            await asyncio.sleep(60)


async def test_who_is_cancelled_while_a_link_ends_is_cancelled_all_the_same() -> None:
    held = PeerSet((), SlowToEnd, every_s=0.001, resolve=Resolver())
    await held.register(["a:1"])
    link = held.by_address["a:1"]
    await asyncio.sleep(0)
    leaving = asyncio.create_task(held.register([]))
    await link.ending.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_localhost_resolves_to_the_loopback_address() -> None:
    assert "127.0.0.1:80" in await resolve("dns:localhost:80")
    assert await resolve("dns:[::1]:80") == ("[::1]:80",)


async def test_a_name_that_nobody_knows_or_can_have_raises() -> None:
    with pytest.raises(OSError, match=r"\w"):
        await resolve("dns:nobody.invalid:80")
    with pytest.raises(UnicodeError):
        await resolve(f"dns:{'a' * 64}.invalid:80")


def test_a_name_without_addresses_is_named_where_nothing_is_served() -> None:
    assert Fleet([NAME], [], Patience()).unreached() == [NAME]


async def test_requests_end_where_they_run_and_new_ones_go_to_who_is_there_now(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await world.verifier(per_tick=1, tick_s=0.02), await world.verifier()
    resolver = Resolver(old.address)
    monkeypatch.setattr("orchestrator.fleet.fleet.resolve", resolver)
    front = await world.ready(await world.front([NAME], resolve_s=0.01))
    stream = front.client.stream(ids=[5], max_tokens=50)
    await anext(stream)
    resolver.found = (new.address,)
    await world.until(lambda: front.sample("peer_up", peer=new.address))
    assert len((await front.client.generate(ids=[5], max_tokens=3)).ids) == 3
    assert len((await stream.completion()).ids) == 50
    assert (len(old.opened), len(new.opened)) == (1, 1)
    await world.until(lambda: old.address not in front.metrics.exposition().decode())


async def test_clients_hear_that_no_verifier_can_be_reached_but_not_its_name(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.fleet.fleet.resolve", Resolver())
    front = await world.front([NAME])
    with pytest.raises(Unavailable, match="no verifier can be reached") as refused:
        await front.client.generate(ids=[5])
    assert "verifiers.test" not in str(refused.value)
