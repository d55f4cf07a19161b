"""A worker's announcement on the wire and in a store, and malformed ones."""

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.store.entries import BrokenEntry, ForeignEntry, entry_from, entry_to_bytes, report_from
from outrider.v1 import registry_pb2
from outrider.wire.workers import (
    CONTRACT,
    ROLES,
    WorkerEntry,
    WorkerState,
    checked,
    entry_from_wire,
    entry_to_wire,
)
from speculative.errors import InvalidRequest

ENTRY = WorkerEntry(
    "verifier", "10.0.0.1:50051", WorkerState("toy", "a1", "d" * 64, "cpu float32", 8, 3, 0.25)
)

digests = st.text("0123456789abcdef", max_size=128)
texts = st.text(string.ascii_letters + " /.-", max_size=256)
counts = st.integers(0, 2**31 - 1)
entries = st.builds(
    WorkerEntry,
    st.sampled_from(sorted(ROLES)),
    st.sampled_from(["a:1", "10.0.0.1:65535", "[::1]:5", "pod-1.workers.svc:50051"]),
    st.builds(
        WorkerState,
        texts,
        digests,
        digests,
        texts,
        counts,
        counts,
        st.integers(0, 10**9).map(lambda us: us * 1e-6),
    ),
    st.integers(1, 9),
    st.booleans(),
)


@settings(deadline=None)
@given(entries)
def test_an_announcement_comes_back_as_it_was(entry: WorkerEntry) -> None:
    assert entry_from_wire(entry_to_wire(entry)) == entry
    assert entry_from(entry_to_bytes(entry)) == entry


@settings(deadline=None)
@given(
    st.builds(
        registry_pb2.AnnounceRequest,
        role=st.integers(0, 5),
        address=st.text(max_size=300),
        model=st.text(max_size=300),
        weights_digest=st.text(max_size=9),
        numerics=st.text(max_size=300),
        capacity=st.integers(0, 2**32 - 1),
        sessions=st.integers(0, 2**32 - 1),
        step_us=st.integers(0, 2**32 - 1),
    )
)
def test_whatever_comes_is_a_worker_or_refused_by_name(message: registry_pb2.AnnounceRequest) -> None:
    why = ""
    try:
        entry = entry_from_wire(message)
    except InvalidRequest as error:
        why = str(error)
    else:
        assert checked(entry) == entry
    assert not why or why.startswith("a worker's ")


def test_an_announcement_without_a_version_speaks_the_first_contract() -> None:
    message = entry_to_wire(ENTRY)
    message.contract = 0
    assert entry_from_wire(message).contract == 1
    assert entry_from_wire(entry_to_wire(ENTRY)).contract == CONTRACT


def altered(**fields: object) -> bytes:
    content = json.loads(entry_to_bytes(ENTRY)[1:])
    return b"1" + json.dumps(content | fields).encode()


def with_state(**fields: object) -> bytes:
    content = json.loads(entry_to_bytes(ENTRY)[1:])
    return altered(state=content["state"] | fields)


@pytest.mark.parametrize(
    "data",
    [
        b"1",
        b"1{",
        b"1[]",
        b"1null",
        b"1{}",
        b"1\xff\xfe",
        b"1" + b"[" * 100_000,
        altered(role="king"),
        altered(address=7),
        altered(address="somewhere"),
        altered(contract="1"),
        altered(contract=True),
        altered(draining="no"),
        altered(more=1),
        altered(state=None),
        altered(state=[1]),
        with_state(capacity=-1),
        with_state(sessions=10**400),
        with_state(sessions=1.5),
        with_state(step_s=float("nan")),
        with_state(step_s=1e9),
        with_state(step_s="fast"),
        with_state(model="a\nb"),
        with_state(also=1),
    ],
)
def test_rubbish_of_this_version_is_broken(data: bytes) -> None:
    with pytest.raises(BrokenEntry):
        entry_from(data)


def test_an_entry_of_another_version_is_foreign() -> None:
    for data in (b"2" + entry_to_bytes(ENTRY)[1:], b"?", b""):
        with pytest.raises(ForeignEntry):
            entry_from(data)


@settings(deadline=None)
@given(st.binary())
def test_no_bytes_are_too_odd(data: bytes) -> None:
    for prefix in (b"", b"1"):
        with pytest.raises((ForeignEntry, BrokenEntry)):
            entry_from(prefix + data)


@pytest.mark.parametrize("sessions", [-1, 2**31, 10**400])
def test_a_report_with_sessions_beyond_reason_is_broken(sessions: int) -> None:
    fields = {
        "address": "v:1",
        "reporter": "r",
        "model": "m",
        "fingerprint": "",
        "capacity": 8,
        "step_s": 0.1,
    }
    report_from(b"1" + json.dumps(fields | {"sessions": 3}).encode())
    with pytest.raises(BrokenEntry):
        report_from(b"1" + json.dumps(fields | {"sessions": sessions}).encode())
