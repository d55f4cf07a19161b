"""A port that cannot be had is named with its setting, the reason and a way out."""

import errno
import socket
from collections.abc import Callable, Iterator

import pytest

from outrider.runtime.children import ServiceFailed, ServiceProcess
from outrider.wire.bind_errors import bind_failure

StartToy = Callable[..., ServiceProcess]


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("setting", "what"), [("bind", "gRPC"), ("metrics_bind", "metrics")], ids=["bind", "metrics_bind"]
)
def test_a_taken_port_is_named_with_its_setting(
    start_toy: StartToy, taken: str, setting: str, what: str
) -> None:
    with pytest.raises(ServiceFailed) as caught:
        start_toy(f"--{setting.replace('_', '-')}", taken)
    assert str(caught.value) == (
        f"cannot serve {what} on {taken}: another process uses port {taken.partition(':')[2]} already: stop "
        f"that process, or give the drafter another {setting} (--{setting.replace('_', '-')} or "
        f"OUTRIDER_DRAFTER__{setting.upper()}; port 0 picks a free port)"
    )


@pytest.mark.parametrize(
    ("bind", "says"),
    [
        ("192.0.2.1:50051", "this machine has no address 192.0.2.1: use one of its own"),
        ("no.such.host.invalid:50051", "the name 'no.such.host.invalid' has no address here"),
        ("127.0.0.1:0", "something odd: correct the cause"),
    ],
)
def test_other_reasons_are_said_in_words_too(bind: str, says: str) -> None:
    error = bind_failure("gRPC", bind, "verifier", "bind", RuntimeError("something odd"))
    assert says in str(error)


def test_a_machine_without_ipv6_is_said_to_have_none() -> None:
    error = bind_failure("HTTP", "[::]:80", "orchestrator", "http_bind", OSError(errno.EAFNOSUPPORT, "no"))
    assert "this machine has no addresses of the kind of [::]: use 0.0.0.0" in str(error)


def test_a_port_that_needs_rights_is_said_to_need_them() -> None:
    error = bind_failure("HTTP", "127.0.0.1:80", "orchestrator", "http_bind", PermissionError(13, "denied"))
    assert "this user may not use port 80" in str(error)
