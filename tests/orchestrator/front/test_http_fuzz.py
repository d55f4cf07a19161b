"""Bodies made from the front's own description: allowed ones are answered, others refused by name."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outrider.tokens import TokenTable
from tests.orchestrator.conftest import World
from tests.orchestrator.front.test_http_completions import PLAIN

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
LAST_EVENTS = {
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": "event: message_stop",
}
QUICK = settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)  # JSON has no others
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


class DescribedFront:
    """A running front, with the OpenAPI description that it serves."""

    def __init__(self, url: str) -> None:
        self._host = url.removeprefix("http://")
        self.document = self.ask("GET", "/openapi.json", b"")[1]
        self._schemas: dict[str, Any] = self.document["components"]["schemas"]
        self._validators: dict[str, Any] = {}

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._host, timeout=100)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
            if answer.headers.get_content_type() == "text/event-stream":
                events = content.decode().split("\n\n")
                assert events[-1] == ""
                return status, events[:-1]
            return status, json.loads(content)
        finally:
            connection.close()

    def body_of(self, path: str) -> dict[str, Any]:
        """The schema of the bodies that a path takes."""
        content = self.document["paths"][path]["post"]["requestBody"]["content"]
        schema: dict[str, Any] = content["application/json"]["schema"]
        return schema

    def allows(self, path: str, body: Any) -> bool:
        """Whether the path's schema allows a body."""
        if path not in self._validators:  # to make one takes longer than to use it
            schema = self.body_of(path) | {"components": self.document["components"]}
            self._validators[path] = jsonschema.Draft202012Validator(schema)
        return bool(self._validators[path].is_valid(body))

    def values(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Values that a schema allows, of the parts of JSON Schema that the document has."""
        if "$ref" in schema:
            return st.deferred(lambda: self.values(self._schemas[schema["$ref"].rpartition("/")[2]]))
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return st.one_of([self.values(one) for one in schema[union]])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._objects(schema)
            case "array":
                items = self.values(schema.get("items", {}))
                return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
            case "integer":
                low, high = _bounds(schema)
                near = st.integers(max(low, -1), min(high, 70))
                return near | near | st.integers(low, high)
            case "number":
                return st.floats(-2, 2) | st.floats(allow_nan=False, allow_infinity=False)
            case "string" if "pattern" in schema:
                return st.from_regex(schema["pattern"], fullmatch=True)
            case "string":
                return st.text(max_size=12)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        return ANYTHING

    def _objects(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        named = {name: self.values(one) for name, one in schema.get("properties", {}).items()}
        needed = set(schema.get("required", ()))
        if not named:
            keys = st.integers(0, 99).map(str) if "patternProperties" in schema else st.text(max_size=4)
            others = schema.get("additionalProperties")
            each = others if isinstance(others, dict) else {}
            each = next(iter(schema.get("patternProperties", {}).values()), each)
            return st.dictionaries(keys, self.values(each), max_size=3)
        optional = st.lists(st.sampled_from(sorted(named)), max_size=4, unique=True)
        return optional.flatmap(
            lambda chosen: st.fixed_dictionaries({name: named[name] for name in {*needed, *chosen}})
        )


def _bounds(schema: dict[str, Any]) -> tuple[int, int]:
    beyond = int(
        schema.get("exclusiveMaximum", 2**63)
    )  # a float in the document, of which one less is itself
    return int(schema.get("minimum", -(2**63))), int(schema.get("maximum", beyond - 1))


@pytest.fixture(scope="module")
def described(table: TokenTable) -> Iterator[DescribedFront]:
    """A front with a fake verifier, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def begin(stack: AsyncExitStack) -> str:
        await stack.__aenter__()
        world = World(stack)
        verifier = await world.verifier(tokens=table, chat=PLAIN, tick_s=0.001, per_tick=8)
        front = await world.front([verifier.address], http_bind="127.0.0.1:0", max_message_mb=1)
        await world.ready(front)
        return front.http

    stack = AsyncExitStack()
    yield DescribedFront(on_loop(begin(stack)))
    on_loop(stack.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def check(described: DescribedFront, path: str, body: Any, statuses: set[int]) -> int:
    status, answer = described.ask("POST", path, json.dumps(body).encode())
    assert status in statuses, (status, answer)
    if status != 200:
        anthropic = path.startswith("/v1/messages")
        fields = {"message", "type"} if anthropic else {"message", "type", "param", "code"}
        assert set(answer["error"]) == fields
        assert answer["error"]["message"]
        assert anthropic or status != 400 or answer["error"]["param"] is not None, answer
    elif isinstance(answer, list):
        assert answer[-1].startswith(LAST_EVENTS.get(path, "data: [DONE]")) or '"error"' in answer[-1]
    return status


@QUICK
@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
def test_what_the_description_allows_is_answered_or_refused_by_name(
    described: DescribedFront, path: str, data: st.DataObject
) -> None:
    body = data.draw(described.values(described.body_of(path)))
    assert described.allows(path, body)
    check(described, path, body, {200, 400, 404})


@QUICK
@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
def test_what_the_description_does_not_allow_is_refused(
    described: DescribedFront, path: str, data: st.DataObject
) -> None:
    body = data.draw(described.values(described.body_of(path)))
    name = data.draw(st.sampled_from(sorted(body)) | st.text(max_size=6)) if body else "x"
    wrong = body | {name: data.draw(ANYTHING)}
    assume(not described.allows(path, wrong))
    check(described, path, wrong, {400})


def test_every_operation_is_described(described: DescribedFront) -> None:
    paths = described.document["paths"]
    assert set(PATHS) == {path for path, operations in paths.items() if "post" in operations}
    for path in PATHS:
        assert described.body_of(path)["$ref"].startswith("#/components/schemas/")
