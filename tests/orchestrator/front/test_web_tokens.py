"""JSON Web Tokens in place of API keys: who signed them decides, and what they say is held to."""

import hmac
import json
import time
from base64 import urlsafe_b64encode
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from orchestrator.front.auth import MOST_USERS, Gate
from orchestrator.front.web_tokens import read_signing_keys, watched_signing_keys
from outrider.client import AsyncClient
from speculative.errors import InvalidRequest, PermissionDenied, QuotaExceeded, Unauthenticated
from tests.edge_device import draft_along, over_websocket, request_of
from tests.orchestrator.front.signed_tokens import (
    PRIVATE,
    RSA,
    RULES,
    claims,
    key_set,
    token,
)

jwt = pytest.importorskip("jwt")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set("p256", "ed", "rsa"))
    return path


def gate_of(file: Path, clock: Any = time.monotonic) -> Gate:
    return Gate(None, tokens=(watched_signing_keys(file, every_s=0.0), RULES), clock=clock)


def tenant_of(gate: Gate, shown: str, named: str = "") -> str:
    with gate.entered(f"Bearer {shown}", "1.2.3.4") as caller:
        return caller.tenant(named)


@pytest.mark.parametrize("kid", PRIVATE)
def test_a_token_of_a_known_key_names_its_tenant(file: Path, kid: str) -> None:
    assert tenant_of(gate_of(file), token(kid)) == "us"


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": None},
        {"sub": None},
        {"sub": ""},
        {"tenant": None},
        {"tenant": ["us"]},
        {"tenant": "no\nname"},
        {"exp": None},
        {"exp": 1_000_000},
        {"nbf": 4_000_000_000},
        {"streams": 0},
        {"streams": "many"},
    ],
    ids=str,
)
def test_a_token_that_does_not_say_what_it_must_is_refused(file: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated):
        tenant_of(gate_of(file), token(**changed))


def _confused() -> str:
    """A token whose secret is a public key of the set, as text that everybody has."""
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    parts = [json.dumps({"alg": "HS256", "kid": "rsa"}), json.dumps(claims())]
    said = ".".join(urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)
    digest = hmac.digest(public, said.encode(), "sha256")
    return f"{said}.{urlsafe_b64encode(digest).decode().rstrip('=')}"


def test_a_token_that_somebody_else_signed_is_refused(file: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    forged = [
        jwt.encode(claims(), other, "ES256", headers={"kid": "p256"}),
        jwt.encode(claims(), other, "ES256", headers={"kid": "unknown"}),
        jwt.encode(claims(), other, "ES256"),
        jwt.encode(claims(), None, "none", headers={"kid": "p256"}),
        _confused(),
        f"{token()[:-8]}AAAAAAAA",
        "a.b.c",
        "..",
    ]
    for shown in forged:
        with pytest.raises(Unauthenticated) as refused:
            tenant_of(gate_of(file), shown)
        assert len(shown) < 20 or shown not in str(refused.value)


def test_a_token_names_one_tenant_alone(file: Path) -> None:
    with pytest.raises(PermissionDenied):
        tenant_of(gate_of(file), token(), named="them")


def test_a_token_that_expires_amid_a_connection_begins_no_further_request(file: Path) -> None:
    now = [100.0]
    with gate_of(file, lambda: now[0]).entered(f"Bearer {token()}", "1.2.3.4") as caller:
        assert caller.tenant() == "us"
        now[0] += 400
        with pytest.raises(Unauthenticated, match="expired"):
            caller.tenant()


def test_users_of_one_tenant_have_quotas_of_their_own(file: Path) -> None:
    gate = gate_of(file)
    one, other = token(streams=1), token(streams=1, sub="other")
    with ExitStack() as stack:
        first, second, again = (
            stack.enter_context(gate.entered(f"Bearer {shown}", "1.2.3.4")) for shown in (one, other, one)
        )
        stack.enter_context(first.within_quota())
        stack.enter_context(second.within_quota())
        with pytest.raises(QuotaExceeded):
            stack.enter_context(again.within_quota())


def test_users_that_come_and_go_hold_no_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.front.auth.MOST_USERS", 4)
    gate = gate_of(file)
    for number in range(12):
        tenant_of(gate, token("ed", sub=str(number)))
    assert len(gate._users) == 4 < MOST_USERS


def test_keys_may_be_replaced_while_the_process_runs(file: Path) -> None:
    gate = gate_of(file)
    assert tenant_of(gate, token("p256")) == "us"
    file.write_bytes(key_set("ed"))
    assert tenant_of(gate, token("ed")) == "us"
    with pytest.raises(Unauthenticated):
        tenant_of(gate, token("p256"))


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "no JSON Web Key Set"),
        (b"[]", "no JSON Web Key Set"),
        (b'{"keys": [3]}', "no JSON Web Key Set"),
        (b'{"keys": []}', "no key for signatures"),
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}).encode(), "give public keys"),
        (json.dumps({"keys": [{"kty": "RSA", "kid": "a"}]}).encode(), "jwt_keys_file"),
        (key_set("p256", "p256"), "same `kid`"),
    ],
    ids=["empty", "a list", "a number", "none", "a secret", "half a key", "twice"],
)
def test_a_file_that_is_no_set_of_public_keys_is_refused(contents: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_signing_keys({"jwt_keys_file": contents})
    assert "c2VjcmV0" not in str(refused.value)


async def test_tokens_open_every_front(world: Any, file: Path) -> None:
    verifier = await world.verifier(per_tick=4)
    front = await world.front(
        [verifier.address], jwt_keys_file=file, http_bind="127.0.0.1:0", jwt_issuer=RULES.issuer
    )
    async with AsyncClient(front.address, api_key=token()) as client:
        await world.until(lambda: front.sample("verifiers_up"))
        assert len((await client.generate(ids=[5], max_tokens=4)).ids) == 4
        async with over_websocket(front.http, f"outrider.bearer.{token('rsa')}") as wire:
            answer = await draft_along(wire, request_of([5, 6], max_tokens=4), lambda have: [])
            assert len(answer.ids) == 4
    assert {opened.key.tenant for opened in verifier.opened} == {"us"}
    with pytest.raises(Unauthenticated):
        await front.client.generate(ids=[5], max_tokens=4)


async def test_a_user_of_tokens_has_sessions_that_no_other_user_reaches(world: Any, file: Path) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.front([verifier.address], jwt_keys_file=file, jwt_issuer=RULES.issuer)
    one, other = token(), token(sub="other")
    async with (
        AsyncClient(front.address, api_key=one) as ours,
        AsyncClient(front.address, api_key=other) as theirs,
    ):
        await world.until(lambda: front.sample("verifiers_up"))
        async with (
            ours.stream(ids=[5], max_tokens=4, session="chat") as mine,
            theirs.stream(ids=[6], max_tokens=4, session="chat"),
        ):
            await world.until(lambda: len(verifier.opened) == 2)
            inside = {opened.ids[0]: opened.key.session for opened in verifier.opened}
            assert inside[5] != inside[6]
            assert not await theirs.cancel(inside[5])
            assert await theirs.cancel("chat")
            await world.until(lambda: verifier.cancelled)
            assert verifier.cancelled[0][0].session == inside[6]
            verifier.per_tick = 4
            answer = await mine.completion()
            assert len(answer.ids) == 4
            assert answer.session == "chat"
