"""Eager and compiled passes are classes of their own: no session begins with what the other class cached."""

import torch

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import COMPILED, EAGER, KVLayout, SlotPool
from outrider.wire.codec import SessionKey
from speculative.params import SamplingParams
from speculative.stop import StopChecker
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.session import Session
from verifier_service.sessions.request import SessionRequest, SourceSet

IDS = tuple(range(4 * BLOCK + 1))


def cache() -> KVCache:
    pool = SlotPool(KVLayout(((1, 1), (1, 1)), torch.float32, torch.device("cpu")), 64 * BLOCK)
    return KVCache(pool, reuse=True, lease_s=0.0)


def begun(kv: KVCache, handle: int) -> Session:
    """A session of the same ids, with as many of them as are cached for it."""
    request = SessionRequest(
        SessionKey("", f"s{handle}"), 1, IDS, len(IDS), 8 * BLOCK, SamplingParams(), 0, (), None, 0, ()
    )
    stop_checker = StopChecker(frozenset(), request.limit, (), None, IDS, len(IDS))
    session = Session(handle, request, stop_checker, 16, SourceSet((), frozenset(), frozenset()))
    assert kv.begin(session)
    return session


def compute(kv: KVCache, session: Session, count: int) -> None:
    """Computes and keeps the session's next `count` ids, as a pass of the present class."""
    table = kv.sequence_rows(session, session.step_rows(count, 0)).table
    table.reserve(table.length + count)
    table.parents, table.depths = list(range(-1, count - 1)), list(range(count))
    kv.keep_rows(session, range(count))


def test_a_session_that_begins_after_a_change_finds_nothing_of_the_class_before() -> None:
    kv = cache()
    first = begun(kv, 1)
    compute(kv, first, 4 * BLOCK)
    assert begun(kv, 2).cached == 4 * BLOCK
    kv.pool.begin_class(COMPILED)
    assert begun(kv, 3).cached == 0


def test_what_a_session_caches_across_a_change_is_never_found_again() -> None:
    kv = cache()
    across = begun(kv, 1)
    compute(kv, across, 2 * BLOCK)
    kv.pool.begin_class(COMPILED)
    compute(kv, across, 2 * BLOCK)
    kv.release(across)
    assert begun(kv, 2).cached == 0
    kv.pool.begin_class(EAGER)
    assert begun(kv, 3).cached == 0
    kv.check()
