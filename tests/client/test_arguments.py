"""A client refuses wrong arguments as it is made, and says what to give."""

from typing import Any

import pytest

from outrider import AsyncClient, AsyncEdgeDrafter, Client, EdgeDrafter
from speculative.errors import InvalidRequest

CLIENTS: list[Any] = [Client, AsyncClient, EdgeDrafter, AsyncEdgeDrafter]
SEVERAL = "host:port of an orchestrator, or several with commas"


def refusal(kind: Any, address: Any, **arguments: Any) -> str:
    model = {"draft_with": "/no/model"} if "Edge" in kind.__name__ else {}
    with pytest.raises(InvalidRequest) as refused:
        kind(address, **model, **arguments)
    return str(refused.value)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("address", [["127.0.0.1:1", "127.0.0.1:2"], None, 123, b"127.0.0.1:1"], ids=repr)
def test_an_address_that_is_no_string_is_refused(kind: Any, address: Any) -> None:
    said = refusal(kind, address)
    assert said == f"address is {address!r}; it must be a string: {SEVERAL}"


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("wrong", ["host", "h:99999", "h:0", ":1", "h:", "a b:1", "::1:5", "unix:1"])
def test_an_address_that_cannot_be_dialled_is_refused(kind: Any, wrong: str) -> None:
    said = refusal(kind, f"127.0.0.1:1,{wrong}")
    assert said == f"the address is {wrong!r}; give host:port of an orchestrator's gRPC, port 1 to 65535"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_takes_no_url(kind: Any) -> None:
    said = refusal(kind, "http://127.0.0.1:8000")
    assert said.startswith("the address is 'http://127.0.0.1:8000'; give host:port")


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:0", "https://h:x", "ftp://h", "http://[::1"])
def test_a_drafter_takes_no_url_that_cannot_be_dialled(url: str) -> None:
    assert refusal(EdgeDrafter, url).startswith(
        f"{url!r} is not the URL of an orchestrator's HTTP API; give "
    )


@pytest.mark.parametrize("address", ["h:1", "h:1, g:65535", "[::1]:5", "dns:h:1", "dns:///h.space.svc:1"])
def test_an_address_that_grpc_dials_is_taken(address: str) -> None:
    Client(address).close()


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("api_key", 5, "api_key is of type int; give the key as a string"),
        ("api_key", b"secret", "api_key is of type bytes; give the key as a string"),
        ("ca", 5, "ca is 5; it must be the path of a file"),
        ("patience_s", "1", "patience_s is '1'; it must be a number of seconds"),
    ],
)
def test_an_argument_of_another_type_is_refused(kind: Any, name: str, value: Any, says: str) -> None:
    assert refusal(kind, "127.0.0.1:1", **{name: value}) == says
