"""Cached blocks: found by what they hold, never by anybody else's, given back in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from outrider.lm.kv.blocks import BlockAllocator
from verifier_service.engine.prefix_cache import BlockHash, BlockHasher, PrefixCache

BLOCK = 4


@dataclass
class World:
    """A cache over a memory whose contents are known."""

    capacity: int = 64
    naming: BlockHasher = field(default_factory=lambda: BlockHasher(BLOCK))
    content: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Tenant and ids up to the block's end, by block."""

    def __post_init__(self) -> None:
        self.blocks = BlockAllocator(self.capacity)
        self.cache = PrefixCache(self.blocks, BLOCK)

    def names(self, ids: list[int], tenant: str = "") -> list[BlockHash]:
        names: list[BlockHash] = []
        self.naming.extend(names, ids, self.naming.salt("model", tenant))
        return names

    def session(self, ids: list[int], tenant: str = "", now: float = 0.0) -> list[int] | None:
        """A session of these ids: what is cached is shared, the rest computed and cached."""
        names = self.names(ids, tenant)
        blocks = self.cache.match(names, len(ids), now)
        for at, block in enumerate(blocks):
            assert self.content[block] == (tenant, tuple(ids[: (at + 1) * BLOCK]))
        self.blocks.share(blocks)
        missing = len(names) - len(blocks)
        if self.blocks.free < missing:
            self.cache.evict(missing - self.blocks.free, now)
        more = self.blocks.take(missing)
        if more is None:
            self.blocks.give(blocks)
            return None
        for at, block in enumerate(more, start=len(blocks)):
            self.content[block] = (tenant, tuple(ids[: (at + 1) * BLOCK]))
        self.cache.publish(names, blocks + more, len(blocks), now)
        return blocks + more

    def end(self, blocks: list[int]) -> None:
        self.blocks.give(blocks)


def test_a_second_turn_finds_the_blocks_of_the_first() -> None:
    world = World()
    first = world.session(list(range(10)))
    assert first is not None
    world.end(first)
    second = world.session([*range(10), 50, 51, 52])
    assert second is not None
    assert second[:2] == first
    assert (world.cache.counts.asked, world.cache.counts.hit) == (23, 8)


def test_the_last_id_is_always_left_to_compute() -> None:
    world = World()
    assert world.session(list(range(8))) is not None
    names = world.names(list(range(8)))
    assert len(world.cache.match(names, 8, 0.0)) == 1
    assert len(world.cache.match(names, 9, 0.0)) == 2


def test_another_tenant_finds_nothing() -> None:
    world = World()
    world.session(list(range(8)), tenant="a")
    assert world.cache.match(world.names(list(range(9)), "b"), 9, 0.0) == []


def test_salts_of_different_parts_differ() -> None:
    naming = BlockHasher(BLOCK)
    assert naming.salt("ab", "c") != naming.salt("a", "bc")


def test_names_depend_on_all_ids_before() -> None:
    world = World()
    assert world.names([1, 2, 3, 4, 5, 6, 7, 8])[1] != world.names([9, 2, 3, 4, 5, 6, 7, 8])[1]


def test_what_a_session_holds_is_not_given_back() -> None:
    world = World(capacity=4)
    held = world.session(list(range(8)))
    assert held is not None
    assert (world.cache.evictable, world.cache.evict(2, 1.0)) == (0, 0)
    world.end(held)
    assert (world.cache.evictable, world.cache.evict(2, 1.0)) == (2, 2)
    assert world.blocks.free == 4


def test_what_a_held_block_continues_is_given_back_after_all_else() -> None:
    """A session that began with a copy of a prefix holds only what it added to it."""
    world = World()
    ids = list(range(13))
    held, other = world.session(ids), world.session([40 + n for n in range(8)])
    assert held is not None
    assert other is not None
    world.end(held[:2])
    world.end(other)
    assert world.cache.evictable == 4
    assert world.cache.evict(2, now=0.0) == 2
    assert len(world.cache.match(world.names(ids), 13, 0.0)) == 3
    assert world.cache.evict(1, now=0.0) == 1
    world.cache.check()
    assert len(world.cache.match(world.names(ids), 13, 0.0)) == 1
    assert world.cache.evict(9, now=0.0) == 1
    world.blocks.check([held[2:], world.cache.held])
    world.end(held[2:])
    assert (len(world.cache), world.blocks.free) == (0, world.capacity)


def test_held_blocks_between_others_do_not_keep_those_in_front_of_them() -> None:
    """Two sessions began with copies of one prefix, the second of them behind what the first had added."""
    world = World()
    held = world.session(list(range(16)))
    assert held is not None
    world.end(held[0::2])
    assert world.cache.evictable == 2
    assert world.cache.evict(2, now=0.0) == 2
    world.cache.check()
    world.blocks.check([held[1::2], world.cache.held])


def test_blocks_that_sessions_share_stay_cached_where_memory_is_short() -> None:
    world = World(capacity=6)
    held = world.session(list(range(16)))
    assert held is not None
    assert world.cache.evict(3, now=0.0) == 0
    assert world.session(list(range(9))) == held[:2]


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    world = World()
    held = world.session(list(range(12)))
    assert held is not None
    world.end(held)
    world.cache.evict(1, 1.0)
    world.cache.check()
    assert len(world.cache.match(world.names(list(range(12))), 13, 1.0)) == 2


def test_the_least_recently_used_goes_first_and_a_lease_protects() -> None:
    world = World()
    chains = [[tag] * BLOCK for tag in range(3)]
    for at, ids in enumerate(chains):
        held = world.session(ids, now=float(at))
        assert held is not None
        world.end(held)
    world.cache.lease(world.names(chains[0]), until=100.0)
    world.cache.evict(1, 10.0)
    kept = [bool(world.cache.match(world.names(ids), 5, 11.0)) for ids in chains]
    assert kept == [True, False, True]
    world.cache.evict(1, 200.0)
    assert not world.cache.match(world.names(chains[0]), 5, 201.0) or len(world.cache) == 1


def test_a_lease_does_not_keep_running_sessions_from_memory() -> None:
    world = World(capacity=2)
    held = world.session(list(range(8)))
    assert held is not None
    world.end(held)
    world.cache.lease(world.names(list(range(8))), until=1e9)
    assert world.session([40 + n for n in range(8)]) is not None


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_edits_find_no_wrong_block_and_lose_none(seed: int) -> None:
    dice = Random(seed)
    world = World(capacity=40)
    running: list[list[int]] = []
    hits = 0
    for now in range(3000):
        if running and dice.random() < 0.5:
            world.end(running.pop(dice.randrange(len(running))))
        elif running and dice.random() < 0.1:
            running.append(one := running.pop(dice.randrange(len(running))))
            world.end(one[:1])  # as if it had begun with a copy of what it shares
            del one[:1]
        elif dice.random() < 0.1:
            world.cache.evict(dice.randrange(4), float(now))
        else:
            ids = [dice.randrange(2) for _ in range(dice.randrange(1, 24))]
            before = world.cache.counts.hit
            held = world.session(ids, tenant=dice.choice("ab"), now=float(now))
            hits += world.cache.counts.hit > before
            running += [held] if held is not None else []
        if dice.random() < 0.05:
            ids = [dice.randrange(2) for _ in range(12)]
            world.cache.lease(world.names(ids, "a"), until=now + 50.0)
        world.cache.check()
        world.blocks.check([*running, world.cache.held])
        if dice.random() < 0.05:
            evictable = world.cache.evictable
            assert world.cache.evict(evictable, float(now)) == evictable
            assert not world.cache.evictable
    assert hits > 200
    assert world.cache.counts.evicted_blocks > 100


class OnlyBehind:
    """Sessions can go on behind these blocks alone."""

    def __init__(self, *ends: int) -> None:
        self.ends = set(ends)
        self.twins: list[tuple[int, int]] = []

    def resumable(self, blocks: Sequence[int]) -> Sequence[int]:
        while blocks and blocks[-1] not in self.ends:
            blocks = blocks[:-1]
        return blocks

    def same(self, cached: int, own: int) -> None:
        self.twins.append((cached, own))


def test_a_prefix_is_found_as_far_as_a_session_can_go_on_behind_it() -> None:
    world = World()
    first = world.session(list(range(13)))
    assert first is not None
    resumption = OnlyBehind(first[1])
    world.cache = PrefixCache(world.blocks, BLOCK, resumption)
    world.cache.publish(world.names(list(range(13))), first, 0, 0.0)

    assert world.cache.match(world.names(list(range(13))), 13, 0.0) == first[:2]
    assert world.cache.counts.hit == 2 * BLOCK
    resumption.ends.clear()
    assert world.cache.match(world.names(list(range(13))), 13, 0.0) == []


def test_a_block_that_is_cached_already_is_named_beside_its_twin() -> None:
    world = World()
    first = world.session(list(range(8)))
    assert first is not None
    resumption = OnlyBehind()
    world.cache = PrefixCache(world.blocks, BLOCK, resumption)
    world.cache.publish(world.names(list(range(8))), first, 0, 0.0)
    own = world.blocks.take(2)
    assert own is not None

    world.cache.publish(world.names(list(range(8))), [first[0], own[1]], 0, 0.0)

    assert resumption.twins == [(first[1], own[1])]
