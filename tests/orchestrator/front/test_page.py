"""The page at /, and what the page shows beside answers: the fleet, rounds, who drafted each token."""

import asyncio
import hashlib
import re
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.http.page.routes import PAGE, policy_of
from outrider.client import AsyncClient
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2
from outrider.wire.epochs import wall_clock_ms
from tests.orchestrator.conftest import Front, World
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_completions import asking
from tests.orchestrator.fronts import soon, write_keys

LOADED = re.compile(r'<[^>]*\b(?:src|href|action)\s*=\s*"([^"]*)"|(@import|url\(|https?:[^"]*)')


def got(url: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=100) as said:
            return said.status, said.read().decode(), dict(said.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


@asynccontextmanager
async def with_keys(
    world: World, table: TokenTable, keys: Path, key: str, **how: Any
) -> AsyncIterator[Front]:
    verifier = await world.verifier(tokens=table, **how)
    front = await world.front([verifier.address], http_bind="127.0.0.1:0", api_keys_file=keys)
    async with AsyncClient(front.address, api_key=key) as client:
        await soon(client.models)
    yield front


def test_the_page_names_nothing_that_lies_elsewhere() -> None:
    assert LOADED.findall(PAGE.read_text()) == [("data:,", "")]


def test_the_policy_allows_the_pages_own_script_and_style_alone() -> None:
    def digest(text: str) -> str:
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = dict(part.split(" ", 1) for part in policy_of("<style>a</style><script>b</script>").split("; "))
    assert policy["default-src"] == "'none'"
    assert (policy["style-src"], policy["script-src"]) == (digest("a"), digest("b"))


async def test_the_page_is_served_without_a_key_and_shows_nothing_without_one(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    (key,) = write_keys(tmp_path / "keys", ["us"])
    async with with_keys(world, table, tmp_path / "keys", key) as front:
        status, text, headers = await asyncio.to_thread(got, front.http, "/")
        refused = [(await asyncio.to_thread(got, front.http, path))[0] for path in ("/fleet", "/explain/a")]
        shown = await asyncio.to_thread(got, front.http, "/fleet", authorization=f"Bearer {key}")
    assert (status, text) == (200, PAGE.read_text())
    assert headers["content-security-policy"] == policy_of(text)
    assert refused == [401, 401]
    assert shown[0] == 200


async def test_an_orchestrator_without_the_page_has_nothing_there(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"page": False}) as (_, _, front):
        status, said, _ = await asyncio.to_thread(send, front.http, "/", b"", "GET")
        docs = await asyncio.to_thread(got, front.http, "/docs")
    assert (status, said["error"]["message"]) == (404, "Not Found")
    assert docs[0] == 200


async def test_the_fleet_is_counted_and_no_address_is_told(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, verifier, front):
        status, said, _ = await asyncio.to_thread(send, front.http, "/fleet", b"", "GET")
    assert status == 200
    assert said["models"] == [{"id": "toy", "sources": ["lookup"]}]
    assert said["verifiers"] == {"known": 1, "reachable": 1, "draining": 0}
    assert said["sources"] == {"known": 0, "reachable": 0}
    assert verifier.address not in str(said)


def explained() -> explain_pb2.Incarnation:
    tree = [explain_pb2.RoundNode(id=5, source=1, survival=0.5, accepted=True)]
    tokens = [explain_pb2.RoundToken(id=5, source=1), explain_pb2.RoundToken(id=6)]
    round_ = explain_pb2.Round(step=1, position=4, committed=2, admitted=1, nodes=tree, tokens=tokens)
    epoch = wall_clock_ms() << 20
    return explain_pb2.Incarnation(epoch=epoch, prompt_tokens=4, source_names=["lookup"], rounds=[round_])


async def test_rounds_of_the_keys_own_sessions_come_with_texts(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    ours, theirs = write_keys(tmp_path / "keys", ["us", "them"])
    async with with_keys(world, table, tmp_path / "keys", ours, explained=[explained()]) as front:

        def of(key: str, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
            return send(front.http, path, b"", "GET", authorization=f"Bearer {key}")

        status, said, _ = await asyncio.to_thread(of, ours, "/explain/cmpl-1-0")
        others = await asyncio.to_thread(of, theirs, "/explain/cmpl-1-0")
        wrong = await asyncio.to_thread(of, ours, "/explain/cmpl-1-0?choice=x")
    assert status == 200
    (one,) = said["incarnations"]
    assert "verifier" not in one
    (round_,) = one["rounds"]
    (node,) = round_["nodes"]
    assert (node["text"], node["parent"], node["accepted"]) == (table.token_bytes(5).decode(), 0, True)
    assert [token["source"] for token in round_["tokens"]] == [1, 0]
    assert (others[0], others[1]["error"]["param"]) == (404, "session")
    assert others[1]["error"]["code"] == "session_not_found"
    assert (wrong[0], wrong[1]["error"]["param"]) == (400, "choice")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_who_drafted_each_token(world: World, table: TokenTable, stream: bool) -> None:
    asked: dict[str, Any] = {"return_token_sources": True, "return_token_ids": True}
    async with asking(world, table, drafts=True) as (client, _, _):
        answer: Any = await client.completions.create(
            model="toy", prompt="abc", max_tokens=7, stream=stream, extra_body=asked
        )
        events = [event async for event in answer] if stream else [answer]
    choices = [choice for event in events for choice in event.choices]
    tokens = [token for choice in choices for token in choice.model_extra["token_sources"]]
    assert "".join(token["text"] for token in tokens) == "".join(choice.text for choice in choices)
    assert len(tokens) == sum(len(choice.model_extra["token_ids"]) for choice in choices) == 7
    assert {token["source"] for token in tokens} == {"lookup", "target"}
