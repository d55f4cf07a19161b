"""Who is let in, and as which tenant."""

import json
from pathlib import Path

import pytest

from orchestrator.front.auth import Gate, watched_keys
from orchestrator.front.quota import LEAST_RETRY_S
from outrider.wire.keys import bearer, new_key
from outrider.wire.origin import host_of
from speculative.errors import (
    OutriderError,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from tests.orchestrator.fronts import write_keys


def header(key: str) -> str:
    return bearer(key)[0][1]


@pytest.mark.parametrize("shown", [None, "Bearer any", "rubbish"])
def test_without_configured_keys_anybody_is_let_in(shown: str | None) -> None:
    with Gate(None).entered(shown, "here") as caller, caller.within_quota(1000):
        assert caller.tenant() == "default"
        assert caller.tenant("named") == "named"


def test_with_keys_the_tenant_is_the_key_s(tmp_path: Path) -> None:
    ours, theirs = write_keys(tmp_path / "keys", ["ours", "theirs"])
    gate = Gate(watched_keys(tmp_path / "keys"))
    with gate.entered(header(ours), "here") as caller:
        assert caller.tenant() == caller.tenant("ours") == "ours"
        for other in ("theirs", "default", "OURS"):
            with pytest.raises(PermissionDenied, match=other):
                caller.tenant(other)
    with gate.entered(header(theirs), "here") as caller:
        assert caller.tenant() == "theirs"


@pytest.mark.parametrize(
    "shown",
    [None, "", "Basic x", "Bearer", f"Bearer {new_key()}", new_key()],
    ids=["nothing", "empty", "basic", "no key", "stranger", "no scheme"],
)
def test_with_keys_nobody_else_is_let_in_and_what_they_showed_is_not_reported(
    tmp_path: Path, shown: str | None
) -> None:
    write_keys(tmp_path / "keys", ["ours"])
    reported: list[OutriderError] = []
    gate = Gate(watched_keys(tmp_path / "keys"), refused=reported.append)
    with pytest.raises(Unauthenticated) as refused, gate.entered(shown, "here"):
        pytest.fail("it was let in")
    assert reported == [refused.value]
    assert not shown or shown.removeprefix("Bearer ") not in str(refused.value) or shown == "Bearer"


def test_a_key_that_is_taken_back_lets_in_no_longer_and_what_began_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (key,) = write_keys(path, ["ours"], streams=1)
    gate = Gate(watched_keys(path, every_s=0.0))
    before = path.read_text()
    with gate.entered(header(key), "here") as caller, caller.within_quota():
        write_keys(path, ["ours"])
        with pytest.raises(Unauthenticated), gate.entered(header(key), "here"):
            pass
        assert caller.tenant() == "ours"
        path.write_text(before)
        with (
            gate.entered(header(key), "here") as again,
            pytest.raises(QuotaExceeded),
            again.within_quota(),
        ):
            pytest.fail("what it uses still counts")


def test_each_key_has_a_quota_of_its_own_that_can_be_changed(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    one, two = write_keys(path, ["ours", "ours"], requests_per_minute=1)
    gate = Gate(watched_keys(path, every_s=0.0), clock=lambda: now[0])
    for key in (one, two):
        with gate.entered(header(key), "here") as caller, caller.within_quota():
            pass
    with gate.entered(header(one), "here") as caller:
        with pytest.raises(QuotaExceeded) as refused, caller.within_quota():
            pass
        assert LEAST_RETRY_S < refused.value.retry_after_s == pytest.approx(60.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(line | {"requests_per_minute": 60}) for line in lines))
    now[0] = 1.0
    with gate.entered(header(one), "here") as caller, pytest.raises(QuotaExceeded), caller.within_quota():
        pass
    now[0] = 2.5
    with gate.entered(header(one), "here") as caller, caller.within_quota():
        pass


def test_calls_of_one_address_are_bounded_and_others_are_not_touched() -> None:
    gate = Gate(None, most_per_peer=2)
    with gate.entered(None, "a"), gate.entered(None, "a"):
        with pytest.raises(Overloaded, match="2 calls come from your address"), gate.entered(None, "a"):
            pass
        with gate.entered(None, "b"):
            pass
    with gate.entered(None, "a"), gate.entered(None, "a"):
        pass


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5", "ipv4:127.0.0.1"),
        ("ipv6:%5B::1%5D:5", "ipv6:%5B::1%5D"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_a_peer_is_its_host(peer: str, host: str) -> None:
    assert host_of(peer) == host
