"""Bodies made to keep the event loop busy: each is refused or answered, and no callback takes long."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.front.http.bodies.bounds import LOOP_BYTES
from outrider.tokens import TokenTable
from tests.in_time import each_in_time, in_time
from tests.loop_time import MOST_S, longest_callback
from tests.orchestrator.conftest import Front, World, next_id
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_abuse import HEAD, raw
from tests.orchestrator.front.test_http_completions import PLAIN

CONTEXT = 131_072
BURST = 1_500
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ITEMS, TURNS = "/v1/responses", "/v1/messages"
ANSWERED = frozenset({200, 400, 404, 413})
"""Statuses of an answer, and of the refusal of a body that is wrong."""
USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BLOCK = {"type": "text", "text": "x"}
BAD = {"role": "robot", "content": 5}


@asynccontextmanager
async def front(world: World, table: TokenTable, **settings: Any) -> AsyncIterator[Front]:
    verifier = await world.verifier(tokens=table, chat=PLAIN, max_length=CONTEXT)
    made = await world.front([verifier.address], http_bind="127.0.0.1:0", **settings)
    await world.ready(made)
    await asyncio.to_thread(send, made.http, CHAT, json.dumps({"messages": [USER], "max_tokens": 1}).encode())
    yield made


# By what they hold; each is made with as many items as are given.
BODIES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "negative ids": (TEXT, lambda n: {"prompt": [-1] * n}),
    "texts and numbers in turn": (TEXT, lambda n: {"prompt": ["x", 1] * (n // 2)}),
    "numbers and texts in turn": (TEXT, lambda n: {"prompt": [1, "x"] * (n // 2)}),
    "many texts": (TEXT, lambda n: {"prompt": ["x"] * n}),
    "many empty lists": (TEXT, lambda n: {"prompt": [[]] * n}),
    "lists in lists": (TEXT, lambda n: {"prompt": [[[]]] * n}),
    "a list of a long list": (TEXT, lambda n: {"prompt": [[-1] * n]}),
    "ids": (TEXT, lambda n: {"prompt": [5] * n, "max_tokens": 1}),
    "many lists of ids": (TEXT, lambda n: {"prompt": [[5] * (n // 256)] * 256, "max_tokens": 1}),
    "a long text": (TEXT, lambda n: {"prompt": "x" * n}),
    "a long text that is not Latin": (TEXT, lambda n: {"prompt": "\u65e5" * n}),
    "a long text of escapes": (TEXT, lambda n: {"prompt": "\u0007" * n}),
    "half characters": (TEXT, lambda n: {"prompt": ["\ud800"] * n}),
    "a table for a prompt": (TEXT, lambda n: {"prompt": {str(at): at for at in range(n)}}),
    "unknown fields": (TEXT, lambda n: {"prompt": "x"} | {f"a{at}": at for at in range(n)}),
    "biases": (TEXT, lambda n: {"prompt": "x", "logit_bias": {str(at): "x" for at in range(n)}}),
    "stop ids": (TEXT, lambda n: {"prompt": "x", "stop_token_ids": [-1] * n}),
    "stop strings": (TEXT, lambda n: {"prompt": "x", "stop": [5] * n}),
    "a long stop string": (TEXT, lambda n: {"prompt": "x", "stop": "x" * n}),
    "sources": (TEXT, lambda n: {"prompt": "x", "speculation": {"sources": [5] * n}}),
    "corpora": (TEXT, lambda n: {"prompt": "x", "speculation": {"corpora": ["../x"] * n}}),
    "unknown fields of a field": (
        TEXT,
        lambda n: {"prompt": "x", "speculation": {str(at): at for at in range(n)}},
    ),
    "a large schema": (
        TEXT,
        lambda n: {"prompt": "x", "structured_outputs": {"json": {"enum": [5] * n}}},
    ),
    "a long expression": (TEXT, lambda n: {"prompt": "x", "structured_outputs": {"regex": "(" * n}}),
    "a long model": (TEXT, lambda n: {"prompt": "x", "model": "x" * n}),
    "a long prediction": (
        TEXT,
        lambda n: {"prompt": "x", "prediction": {"type": "content", "content": "x" * n}},
    ),
    "parts of a prediction": (
        TEXT,
        lambda n: {"prompt": "x", "prediction": {"type": "content", "content": [5] * n}},
    ),
    "a long reference": (TEXT, lambda n: {"prompt": "x", "references": ["x" * n]}),
    "many references": (TEXT, lambda n: {"prompt": "x", "references": ["x"] * n}),
    "numbers for references": (TEXT, lambda n: {"prompt": "x", "references": [5] * n}),
    "bad messages": (CHAT, lambda n: {"messages": [BAD] * n}),
    "messages": (CHAT, lambda n: {"messages": [USER] * n, "max_tokens": 1}),
    "numbers for messages": (CHAT, lambda n: {"messages": [5] * n}),
    "parts of a message": (CHAT, lambda n: {"messages": [{"role": "user", "content": [5] * n}]}),
    "unknown fields of a message": (CHAT, lambda n: {"messages": [USER | {f"a{at}": at for at in range(n)}]}),
    "a long message": (CHAT, lambda n: {"messages": [USER | {"content": "x" * n}], "max_tokens": 1}),
    "items": (ITEMS, lambda n: {"input": [USER] * n, "max_output_tokens": 1}),
    "bad items": (ITEMS, lambda n: {"input": [{"type": 5}] * n}),
    "calls": (ITEMS, lambda n: {"input": [CALL] * n, "max_output_tokens": 1}),
    "parts of an item": (ITEMS, lambda n: {"input": [{"role": "user", "content": [5] * n}]}),
    "tools of other types": (ITEMS, lambda n: {"input": "x", "tools": [{"type": "x"}] * n}),
    "turns": (TURNS, lambda n: {"messages": [USER] * n, "max_tokens": 1}),
    "blocks of a turn": (
        TURNS,
        lambda n: {"messages": [{"role": "user", "content": [BLOCK] * n}], "max_tokens": 1},
    ),
    "bad blocks of a result": (
        TURNS,
        lambda n: {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [5] * n}]}
            ],
            "max_tokens": 1,
        },
    ),
    "turns to count": (f"{TURNS}/count_tokens", lambda n: {"messages": [USER] * n}),
    "a text to tokenize": ("/tokenize", lambda n: {"prompt": "x" * n, "return_token_strs": True}),
    "messages to tokenize": ("/tokenize", lambda n: {"messages": [USER] * n}),
    "negative tokens": ("/detokenize", lambda n: {"tokens": [-1] * n}),
    "tokens": ("/detokenize", lambda n: {"tokens": [5] * n}),
    "tokens beyond the vocabulary": ("/detokenize", lambda n: {"tokens": [2**32 - 1] * n}),
    "a list for a body": (TEXT, lambda n: [[]] * n),
}


QUICK = ("negative ids", "texts and numbers in turn", "bad messages", "negative tokens")
"""Those that once held the loop for longest, and one of each route."""


def of_size(make: Callable[[int], Any], size: int) -> bytes:
    """A body of this kind with nearly so many bytes, and no more."""
    count = 256
    for _ in range(4):
        count = max(1, int(count * 0.97 * size / len(json.dumps(make(count)))))
    body = json.dumps(make(count)).encode()
    assert 0.8 * size < len(body) <= size
    return body


async def check(front: Front, path: str, body: bytes) -> int:
    """The status of the answer, once no callback took long."""
    with longest_callback() as longest:
        status, said, _ = await asyncio.to_thread(send, front.http, path, body)
    assert status in ANSWERED, said
    fields = {"message", "type"} if path.startswith(TURNS) else {"message", "type", "param", "code"}
    assert status == 200 or set(said["error"]) == fields
    assert status == 200 or len(json.dumps(said)) < 4_000
    in_time(longest.processor_s < MOST_S, longest)
    return status


async def check_each(front: Front, kinds: Iterable[str], *sizes: int) -> None:
    """Checks a body of each kind and size, and those again that took the loop for long."""

    async def checked(case: tuple[str, int]) -> None:
        what, size = case
        path, make = BODIES[what]
        try:
            await check(front, path, of_size(make, size))
        except AssertionError as error:
            error.add_note(f"the body: {what}, {size} bytes")
            raise

    await each_in_time(checked, itertools.product(kinds, sizes))


async def test_a_body_of_each_route_takes_the_loop_for_no_long(world: World, table: TokenTable) -> None:
    async with front(world, table) as at:
        await check_each(at, QUICK, LOOP_BYTES, 3 * LOOP_BYTES)


@pytest.mark.slow
async def test_no_body_takes_the_loop_for_long(world: World, table: TokenTable) -> None:
    async with front(world, table) as at:
        await check_each(at, BODIES, LOOP_BYTES, 3 * LOOP_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("what", BODIES)
async def test_no_large_body_takes_the_loop_for_long(world: World, table: TokenTable, what: str) -> None:
    path, make = BODIES[what]
    async with front(world, table) as at:
        await check(at, path, json.dumps(make(300_000)).encode())


async def test_prompts_are_counted_before_any_is_tokenized(world: World, table: TokenTable) -> None:
    async with front(world, table) as at:
        with longest_callback() as longest:
            status, said, _ = await asyncio.to_thread(
                send, at.http, TEXT, json.dumps({"prompt": ["x" * 100] * 5_000}).encode()
            )
    assert status == 400
    assert said["error"]["message"] == "prompt has 5000 prompts; at most 256 are answered at once"
    in_time(longest.processor_s < MOST_S, longest)


async def test_a_body_in_tiny_chunks_costs_little(world: World, table: TokenTable) -> None:
    chunks = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000
    async with front(world, table) as at:
        with longest_callback() as longest, contextlib.suppress(ConnectionError):  # bytes are left unread
            assert (await raw(at.http, chunks)).startswith(b"HTTP/1.1 400")
        status, *_ = await asyncio.to_thread(send, at.http, "/health", b"", "GET")
    assert status == 200
    in_time(longest.processor_s < MOST_S, longest)


async def test_a_chunk_that_is_larger_than_any_body_is_refused_at_once(
    world: World, table: TokenTable
) -> None:
    chunk = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + b" " * 1_000
    async with front(world, table) as at, asyncio.timeout(60):
        assert (await raw(at.http, chunk)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("kinds", "tokens"), [(QUICK, 400), pytest.param(tuple(BODIES), 4_000, marks=pytest.mark.slow)]
)
async def test_a_stream_goes_on_beside_hostile_bodies(
    world: World, table: TokenTable, kinds: Sequence[str], tokens: int
) -> None:
    hostile = [(path, json.dumps(make(30_000)).encode()) for path, make in map(BODIES.__getitem__, kinds)]
    async with front(world, table, max_streams=512) as at:  # beside a stream there is room for 256 prompts
        stream = at.client.stream(ids=[5, 6, 7], max_tokens=tokens)
        answering = asyncio.create_task(stream.completion())
        answers = [(path, await asyncio.to_thread(send, at.http, path, body)) for path, body in hostile]
        answer = await answering
    odd = [(path, status, said) for path, (status, said, _) in answers if status not in ANSWERED]
    assert not odd
    assert list(answer.ids) == [next_id(position) for position in range(3, 3 + tokens)]


async def test_a_burst_of_connections_is_accepted_in_pieces(world: World, table: TokenTable) -> None:
    async with front(world, table) as at:
        host, port = at.http.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(BURST):  # in one callback, so that the kernel holds them all
                stack.enter_context(socket.create_connection((host, int(port)), timeout=5.0))
            watched = stack.enter_context(longest_callback())
            status, *_ = await asyncio.to_thread(send, at.http, "/health", b"", "GET")
    assert status == 200
    in_time(watched.processor_s < MOST_S / 2, watched)
