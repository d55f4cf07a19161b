"""What one device may send: shape, epoch, base and credits, checked before a verifier sees anything."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.edge.account import MOST_NODES, RECENT, Credits, DraftAccount, Dropped
from outrider.v1 import generation_pb2
from speculative.errors import MalformedDraft
from speculative.hashing import prefix_hash

VOCABULARY = 100
PROMPT = (5, 6, 7)
EPOCH = 9


def account(*, first: int = 1000, per_token: int = 4) -> DraftAccount:
    return DraftAccount(PROMPT, VOCABULARY, Credits(first, per_token))


def window(before: Sequence[int], ids: Sequence[int], **fields: object) -> generation_pb2.DeviceDrafts:
    """A chain that continues the ids `before`."""
    made = {"base": len(before), "prefix_hash": prefix_hash(before), "ids": ids, **fields}
    made.setdefault("survival", bytes([255] * len(ids)))
    return generation_pb2.DeviceDrafts(**made)  # type: ignore[arg-type]  # a test's own fields


def test_a_window_behind_the_committed_ids_goes_on_under_the_sessions_epoch() -> None:
    fragment = account().take(window(PROMPT, [1, 2, 3]), EPOCH, stale=False)
    assert fragment is not None
    assert (fragment.base, fragment.epoch, fragment.tokens) == (3, EPOCH, (1, 2, 3))


def test_windows_in_flight_continue_one_another() -> None:
    device = account()
    assert device.take(window(PROMPT, [1, 2]), EPOCH, stale=False)
    assert device.take(window((*PROMPT, 1, 2), [3, 4]), EPOCH, stale=False)
    device.committed([1, 2, 3])
    assert device.take(window((*PROMPT, 1, 2, 3, 4), [8]), EPOCH, stale=False), "still ahead"


def test_a_window_behind_a_refuted_one_is_dropped_by_itself() -> None:
    device = account()
    assert device.take(window(PROMPT, [1, 2]), EPOCH, stale=False)
    device.committed([9, 9])
    assert device.take(window((*PROMPT, 1, 2), [3]), EPOCH, stale=False) is None
    assert device.counts.dropped == Counter({Dropped.STALE: 1})


def test_a_window_that_leaves_one_out_is_dropped() -> None:
    device = account()
    assert device.take(window((*PROMPT, 1, 2), [3]), EPOCH, stale=False) is None
    assert device.counts.dropped[Dropped.STALE] == 1


def test_drafts_of_an_older_epoch_are_dropped_and_cost_credits() -> None:
    device = account(first=4)
    assert device.take(window(PROMPT, [1, 2, 3]), EPOCH, stale=True) is None
    assert device.take(window(PROMPT, [1, 2]), EPOCH, stale=False) is None, "one credit is left"
    assert device.counts.dropped == Counter({Dropped.STALE: 3, Dropped.CREDIT: 2})


def test_credits_come_back_with_the_tokens_that_the_device_receives() -> None:
    device = account(first=3, per_token=4)
    assert device.take(window(PROMPT, [1, 2, 3]), EPOCH, stale=False)
    assert device.take(window(PROMPT, [4]), EPOCH, stale=False) is None
    device.committed([1])
    assert device.take(window((*PROMPT, 1), [2, 3, 4, 5]), EPOCH, stale=False)
    assert device.take(window((*PROMPT, 1), [6]), EPOCH, stale=False) is None


def test_a_replayed_window_costs_credits_each_time() -> None:
    device = account(first=10, per_token=0)
    taken = [device.take(window(PROMPT, [1, 2, 3]), EPOCH, stale=False) for _ in range(5)]
    assert [fragment is not None for fragment in taken] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    "drafts",
    [
        window(PROMPT, []),
        window(PROMPT, [VOCABULARY]),
        window(PROMPT, [2**32 - 1]),
        window(PROMPT, [1] * 256),
        window(PROMPT, [1] * 100_000),
        window(PROMPT, [1, 2], parents=bytes([1, 0])),
        window(PROMPT, [1, 2], parents=bytes([0])),
        window(PROMPT, [1, 2], survival=bytes([1])),
    ],
    ids=["empty", "id", "large id", "256", "many", "parents", "few parents", "few survivals"],
)
def test_what_no_device_that_works_would_send_is_malformed(drafts: generation_pb2.DeviceDrafts) -> None:
    device = account()
    with pytest.raises(MalformedDraft):
        device.take(drafts, EPOCH, stale=False)
    assert device.counts.dropped[Dropped.MALFORMED] == len(drafts.ids)
    assert not device.counts.forwarded


def test_the_prefix_hash_goes_with_every_commit() -> None:
    device = account()
    assert device.committed([1]) == prefix_hash((*PROMPT, 1))
    assert device.committed([2, 3]) == prefix_hash((*PROMPT, 1, 2, 3))


def test_what_is_kept_of_a_session_is_bounded() -> None:
    device = DraftAccount(PROMPT, VOCABULARY, Credits(10**6, 10**4))
    ids = list(PROMPT)
    for step in range(3 * RECENT):
        token = step % VOCABULARY
        assert device.take(window(ids, [token, 1, 2]), EPOCH, stale=False)
        device.committed([token])
        ids.append(token)
    assert len(device._committed) <= RECENT
    assert len(device._drafted) <= MOST_NODES
    assert device.take(window(PROMPT, [1]), EPOCH, stale=False) is None, "far behind"


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2 * VOCABULARY), max_size=6),
            st.integers(0, 12),
            st.integers(0, 2**64 - 1) | st.just(prefix_hash(PROMPT)),
            st.binary(max_size=6),
        ),
        max_size=20,
    )
)
def test_every_node_is_forwarded_or_counted_as_dropped(sent: list[tuple[list[int], int, int, bytes]]) -> None:
    device, went_on = account(first=30), 0
    for ids, base, hash_, parents in sent:
        drafts = generation_pb2.DeviceDrafts(
            base=base, prefix_hash=hash_, ids=ids, parents=parents, survival=bytes([255] * len(ids))
        )
        try:
            fragment = device.take(drafts, EPOCH, stale=False)
        except MalformedDraft:
            continue
        went_on += 0 if fragment is None else len(fragment)
    assert went_on + sum(device.counts.dropped.values()) == device.counts.nodes
    assert went_on <= 30
