"""A busy worker's memory is always full of what is cached: room in it is not looked for again and again."""

from typing import Any

import pytest
import torch

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from speculative.stop import FinishReason, StopChecker
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.prefix_cache import BlockHasher, PrefixCache
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool
from verifier_service.engine.stats import CountsByName, EngineTotals
from verifier_service.sessions.request import SessionRequest, SourceSet

BLOCKS = 1280


@pytest.fixture
def kv() -> KVCache:
    """Memory that is full of cached blocks, which nobody holds."""
    pool = SlotPool(KVLayout(((1, 1), (1, 1)), torch.float32, torch.device("cpu")), BLOCKS * BLOCK)
    kv = KVCache(pool, reuse=True, lease_s=0.0)
    naming = BlockHasher(BLOCK)
    for number in range(BLOCKS // 10):
        names: list[bytes] = []
        naming.extend(names, [number] * 10 * BLOCK, naming.salt("t"))
        blocks = pool.take(10)
        kv.prefixes.publish(names, blocks, 0, now=float(number))
        pool.blocks.give(blocks)
    assert (kv.free, kv.available) == (0, BLOCKS)
    return kv


def session(handle: int, length: int) -> Session:
    ids = tuple(handle for _ in range(length))
    key = SessionKey("", f"s{handle}")
    request = SessionRequest(key, 1, ids, length, BLOCKS * BLOCK // 2, SamplingParams(), 0, (), None, 0, ())
    stop_checker = StopChecker(frozenset(), request.limit, (), None, ids, length)
    return Session(handle, request, stop_checker, 16, SourceSet((), frozenset(), frozenset()))


def test_what_is_cached_is_looked_through_once_for_many_blocks(
    kv: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = PrefixCache.evict
    monkeypatch.setattr(
        PrefixCache, "evict", lambda self, *given: (asked.append(given[0]), real(self, *given))[1]
    )
    blocks = [kv.pool.take(1)[0] for _ in range(100)]
    assert len(set(blocks)) == 100
    assert len(asked) < 10
    kv.pool.check_integrity([blocks, kv.prefixes.held])


def test_a_session_that_there_is_no_room_for_is_looked_at_again_when_another_has_left(
    kv: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real: Any = PrefixCache.evictable.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(PrefixCache, "evictable", property(lambda self: (looks.append(1), real(self))[1]))
    running = SessionPool(kv, Scheduler(8), EngineTotals(), CountsByName())
    first, second = session(1, BLOCKS * BLOCK // 2 - 1), session(2, BLOCKS * BLOCK // 2 - 1)
    running.open(first, 0.0)
    assert running.ready() == [first]
    sequence = kv.sequence_rows(first, first.step_rows(first.uncomputed, 0))
    sequence.table.reserve((BLOCKS - 2) * BLOCK)
    running.open(second, 0.0)
    looks.clear()
    for _ in range(50):
        assert running.ready() == [first]
    assert len(looks) <= 1
    running.end(first, FinishReason.CANCELLED, "it was enough")
    assert running.ready() == [second]
