"""Signing keys from a URL: fetched anew when due, never waited for, and kept while the URL is down."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.front import fetched_keys
from orchestrator.front.auth import Gate
from orchestrator.front.fetched_keys import EVERY_S, UNKNOWN_EVERY_S, FetchedKeys, FetchPlan, checked_url
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient
from speculative.errors import InvalidRequest, Unauthenticated, Unavailable
from tests.orchestrator.front.signed_tokens import RULES, key_set, token


class SignIn:
    """A sign-in service on loopback that publishes a key set.

    Attributes:
        answer: status and body of the answers to come.
        fetched: number of calls so far.
        answers: cleared while calls are to wait for their answers.
    """

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, key_set("p256"))
        self.fetched = 0
        self.answers = threading.Event()
        self.answers.set()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.fetched += 1
                service.answers.wait(60)
                status, body = service.answer
                self.send_response(status)
                self.send_header("Location", f"{service.url}?again")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/jwks.json"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Clock:
    """Monotonic seconds that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def sign_in() -> Iterator[SignIn]:
    service = SignIn()
    yield service
    service.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fetched(sign_in: SignIn, clock: Clock) -> FetchedKeys:
    keys = FetchedKeys(sign_in.url, clock)
    keys.wait_fetched()
    return keys


def tenant(keys: FetchedKeys, shown: str) -> str:
    gate = Gate(None, tokens=(keys, RULES))
    with gate.entered(f"Bearer {shown}", "1.2.3.4") as caller:
        return caller.tenant("")


def test_tokens_are_checked_with_the_fetched_keys_and_nothing_is_fetched_twice(
    sign_in: SignIn, clock: Clock
) -> None:
    keys = fetched(sign_in, clock)
    assert [tenant(keys, token()) for _ in range(3)] == ["us"] * 3
    assert sign_in.fetched == 1


def test_a_new_key_is_fetched_when_its_first_token_comes(sign_in: SignIn, clock: Clock) -> None:
    keys = fetched(sign_in, clock)
    sign_in.answer = 200, key_set("p256", "ed")
    clock.now_s += UNKNOWN_EVERY_S
    with pytest.raises(Unavailable, match="try again"):
        tenant(keys, token("ed"))
    keys.wait_fetched()
    assert tenant(keys, token("ed")) == "us"
    assert sign_in.fetched == 2


def test_made_up_keys_cause_no_more_than_one_fetch_in_a_while(sign_in: SignIn, clock: Clock) -> None:
    keys = fetched(sign_in, clock)
    clock.now_s += UNKNOWN_EVERY_S
    with pytest.raises(Unavailable):
        tenant(keys, token("rsa"))
    keys.wait_fetched()
    for _ in range(20):
        with pytest.raises(Unauthenticated, match="kid"):
            tenant(keys, token("rsa"))
    keys.wait_fetched()
    assert sign_in.fetched == 2
    assert tenant(keys, token()) == "us"


def test_old_keys_are_fetched_again_and_a_key_that_was_withdrawn_opens_nothing(
    sign_in: SignIn, clock: Clock
) -> None:
    keys = fetched(sign_in, clock)
    sign_in.answer = 200, key_set("ed")
    sign_in.answers.clear()
    clock.now_s += EVERY_S
    assert tenant(keys, token()) == "us"  # checked with the keys at hand while the fetch runs
    sign_in.answers.set()
    keys.wait_fetched()
    with pytest.raises(Unauthenticated):
        tenant(keys, token())
    assert tenant(keys, token("ed")) == "us"


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"{}"),
        (302, key_set("ed")),
        (200, b"<html>"),
        (200, b'{"keys": []}'),
        (200, b" " * (fetched_keys.MOST_BYTES + 1)),
    ],
    ids=["an error", "a redirect", "rubbish", "no key", "too long"],
)
def test_while_the_url_gives_no_keys_the_former_ones_hold(
    sign_in: SignIn, clock: Clock, answer: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    keys = fetched(sign_in, clock)
    sign_in.answer = answer
    clock.now_s += EVERY_S
    keys.current()
    keys.wait_fetched()
    assert sign_in.fetched == 2
    assert "stay in use" in caplog.text
    assert tenant(keys, token()) == "us"


def test_a_url_that_is_down_at_first_refuses_tokens_for_now_and_is_tried_again(
    sign_in: SignIn, clock: Clock
) -> None:
    sign_in.answer = 503, b""
    keys = fetched(sign_in, clock)
    with pytest.raises(Unavailable):
        tenant(keys, token())
    sign_in.answer = 200, key_set("p256")
    clock.now_s += fetched_keys.RETRY_S
    keys.current()
    keys.wait_fetched()
    assert tenant(keys, token()) == "us"


def test_a_server_that_drips_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, sign_in: SignIn, clock: Clock
) -> None:
    monkeypatch.setattr(fetched_keys, "FETCH_S", 0.2)
    ended = threading.Event()

    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while not ended.wait(0.02):
                self.wfile.write(b" ")

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Expects the client to hang up."""

    with Server(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        keys = FetchedKeys(f"http://127.0.0.1:{server.server_address[1]}/", clock)
        keys.wait_fetched()
        with pytest.raises(Unavailable):
            tenant(keys, token())
        ended.set()
        server.shutdown()


@pytest.mark.parametrize(
    "url",
    [
        "http://sign-in.example/jwks.json",
        "ftp://127.0.0.1/jwks.json",
        "file:///etc/keys.json",
        "https://me:secret@sign-in.example/jwks.json",
        "https://[::1/jwks.json",
        "https:///jwks.json",
        "jwks.json",
    ],
)
def test_urls_from_which_keys_must_not_come_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="jwt_keys_url"):
        FetchedKeys(url)


@pytest.mark.parametrize(
    "url", ["https://sign-in.example/keys?v=1", "http://[::1]:8/k", "http://localhost/k"]
)
def test_urls_from_which_keys_may_come(url: str) -> None:
    assert checked_url(url).geturl() == url


def test_failed_fetches_are_repeated_after_growing_pauses() -> None:
    plan, now_s, pauses = FetchPlan(), 0.0, []
    for _ in range(9):
        plan.began(now_s)
        assert not plan.is_due(now_s + 1e6)
        plan.ended(now_s, succeeded=False)
        pause_s = next(tick / 2 for tick in range(1000) if plan.is_due(now_s + tick / 2))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_file_and_a_url_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        OrchestratorSettings(
            verifier=("a:1",), jwt_keys_file="keys.json", jwt_keys_url="https://sign-in.example/"
        )


async def test_tokens_of_a_url_open_the_fronts(world: Any, sign_in: SignIn) -> None:
    verifier = await world.verifier(per_tick=4)
    front = await world.front([verifier.address], jwt_keys_url=sign_in.url, jwt_issuer=RULES.issuer)
    async with AsyncClient(front.address, api_key=token()) as client:
        await world.until(lambda: front.sample("verifiers_up"))
        assert len((await client.generate(ids=[5], max_tokens=4)).ids) == 4
    with pytest.raises(Unauthenticated):
        await front.client.generate(ids=[5], max_tokens=4)
