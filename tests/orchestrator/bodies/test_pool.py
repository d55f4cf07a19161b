"""Processes that read bodies: what they hand back, what ends them, and that none stays behind."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.http import spawning
from orchestrator.front.http.bodies.bounds import BodyBounds, BodyKind
from orchestrator.front.http.bodies.frames import BodyTask
from orchestrator.front.http.bodies.pool import MODULE, ReaderPool
from orchestrator.front.http.bodies.reading import ReadBody, parse_json, read_value
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.fields import CompletionFields
from outrider.tokens import ChatTemplate
from speculative.errors import OutriderError, Overloaded, Unavailable
from tests.in_time import in_time
from tests.processes import own_children_running

BOUNDS = BodyBounds(context=131_072, text_bytes=2**23, prompts=256, most_bytes=2**25)
HI = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


class Pool:
    """A pool, and short ways to ask it."""

    def __init__(self) -> None:
        self._others = readers()
        self.seconds: list[float] = []
        self.ended: list[None] = []
        self.pool = ReaderPool(observe=self.seconds.append, ended=lambda: self.ended.append(None))

    def children(self) -> list[int]:
        """Process ids of this pool's readers; servers of other tests in this process may have their own."""
        return sorted(readers() - self._others)

    async def read(self, kind: BodyKind, body: Any, template: str = "", owner: str = "me") -> ReadBody:
        data = bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
        task = BodyTask(kind, len(data), BOUNDS, {"toy": ChatTemplate(template, {"eos_token": "</s>"})})
        return await self.pool.read(task, data, owner)

    async def rendered(self, template: str, owner: str = "me") -> str:
        (text,) = (await self.read(BodyKind.CHAT, {"messages": HI}, template, owner)).prompts
        assert isinstance(text, str)
        return text


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    yield made
    await made.pool.stop()
    assert not made.children()


def readers() -> set[int]:
    """Process ids of the readers among the children of this process."""
    return {*own_children_running(MODULE)}


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110  # other processes make it happen
            await asyncio.sleep(0.005)


async def test_a_body_read_by_a_process_is_the_body_read_here(pool: Pool) -> None:
    body = {"prompt": [[5, 2**32 - 1], [7]], "logit_bias": {"5": 1.5}, "stop": ["é"], "seed": 2**64 - 1}
    body["prediction"] = {"type": "content", "content": [{"type": "text", "text": "日"}] * 2}
    body["references"] = ["", "é", "w"]
    there = await pool.read(BodyKind.COMPLETION, body)
    here = read_value(BodyKind.COMPLETION, parse_json(json.dumps(body).encode()), BOUNDS, lambda *_: "")
    assert there.prompts == here.prompts == (array("I", [5, 2**32 - 1]), array("I", [7]))
    assert there.prediction == here.prediction == "日\n日"
    assert there.references == here.references == ("", "é", "w")
    left_out = {"prompt", "prediction", "references"}
    assert there.fields.model_dump() == here.fields.model_dump(exclude=left_out) | {
        "prediction": None,
        "references": None,
    }
    assert type(there.fields) is CompletionFields


async def test_texts_of_any_length_come_back_whole(pool: Pool) -> None:
    texts = ["", "x", "日" * 700_000, "y" * 10]
    assert (await pool.read(BodyKind.COMPLETION, {"prompt": texts})).prompts == tuple(texts)


async def test_a_refusal_is_the_same_from_a_process(pool: Pool) -> None:
    with pytest.raises(FieldRefused) as refused:
        await pool.read(BodyKind.COMPLETION, {"prompt": [1, -1, "x"]})
    assert refused.value.param == "prompt[1]"
    assert str(refused.value).startswith("prompt[1] is -1: it must be")


async def test_conversations_are_rendered_by_the_model_that_is_named_or_the_only_one(pool: Pool) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    assert await pool.rendered(template) == "user:hi</s>"
    named = await pool.read(BodyKind.CHAT, {"model": "toy", "messages": HI}, template)
    assert named.prompts == ("user:hi</s>",)
    unknown = await pool.read(BodyKind.CHAT, {"model": "other", "messages": HI}, template)
    assert unknown.prompts == ("",)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (ENDLESS, "did not end within 2 s"),
        ("{% macro f() %}{% for a in messages %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}", "Recursion"),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
        ("{{ 'x' * 10000000000 }}", "characters"),
        ("{{ 10 ** 10 ** 10 }}", "not possible"),
        ("{{ raise_exception('no') }}", "cannot take these messages: no"),
        (
            "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "MiB|did not end within 2 s",
        ),
        ("{{ ''.__class__.__mro__ }}", "failed|cannot"),
    ],
)
async def test_a_template_without_an_end_is_ended_and_the_next_one_rendered(
    pool: Pool, template: str, why: str
) -> None:
    with pytest.raises(FieldRefused, match=why) as refused:
        await pool.rendered(template)
    assert refused.value.param == "messages"
    assert await pool.rendered("ok") == "ok"


async def test_a_template_cannot_see_what_the_orchestrator_has(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR__REDIS_URL", "redis://:secret@host")
    await pool.rendered("ok")
    (pid,) = pool.children()
    assert b"secret" not in environment_of(pid)


async def test_a_process_that_is_killed_amid_a_body_is_replaced_and_the_body_read_again(pool: Pool) -> None:
    await pool.rendered("ok")
    (first,) = pool.children()
    asking = asyncio.create_task(pool.read(BodyKind.COMPLETION, {"prompt": "x" * 2**23}))
    os.kill(first, signal.SIGSTOP)  # so that it cannot be done before it is killed
    await until(lambda: not pool.pool._ready)
    os.kill(first, signal.SIGKILL)
    assert (await asking).prompts == ("x" * 2**23,)
    assert first not in pool.children()
    assert len(pool.ended) == 1


async def test_a_process_that_is_killed_between_two_bodies_costs_no_client_a_refusal(pool: Pool) -> None:
    await pool.rendered("ok")
    (first,) = pool.children()
    os.kill(first, signal.SIGKILL)
    flags = os.WEXITED | os.WNOWAIT  # it is gone, and nobody has noticed
    await asyncio.to_thread(os.waitid, os.P_PID, first, flags)
    assert await pool.rendered("ok") == "ok"
    assert first not in pool.children()
    assert len(pool.ended) == 1


async def test_a_body_amid_which_two_processes_are_killed_is_refused(pool: Pool) -> None:
    asking = asyncio.create_task(pool.rendered(ENDLESS))
    await until(pool.children)
    (first,) = pool.children()
    os.kill(first, signal.SIGKILL)
    await until(lambda: {*pool.children()} - {first})
    (second,) = {*pool.children()} - {first}
    os.kill(second, signal.SIGKILL)
    with pytest.raises(FieldRefused, match="too much time or memory"):
        await asking
    assert await pool.rendered("ok") == "ok"


async def test_a_body_that_used_up_the_processor_time_is_not_read_again(pool: Pool) -> None:
    asking = asyncio.create_task(pool.rendered(ENDLESS))
    await until(pool.children)
    (first,) = pool.children()
    os.kill(first, signal.SIGXCPU)
    with pytest.raises(FieldRefused, match="too much time or memory"):
        await asking
    assert len(pool.ended) == 1


async def test_a_body_that_nobody_waits_for_any_more_is_not_read_again(pool: Pool) -> None:
    asking = asyncio.create_task(pool.rendered(ENDLESS))
    await until(pool.children)
    (first,) = pool.children()
    asking.cancel()
    await asyncio.wait((asking,))
    os.kill(first, signal.SIGKILL)
    await until(lambda: not pool.pool._working)
    assert not pool.children()
    assert len(pool.ended) == 1


async def test_a_process_that_stops_reading_a_body_is_killed_and_replaced(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.rendered("ok")
    (first,) = pool.children()
    os.kill(first, signal.SIGSTOP)
    async with asyncio.timeout(30):
        with monkeypatch.context() as soon:
            soon.setattr("orchestrator.front.http.bodies.pool.WALL_S", 0.2)
            with pytest.raises(Overloaded):
                await pool.read(BodyKind.COMPLETION, {"prompt": "x" * 2**23})
        assert await pool.rendered("ok") == "ok"
    assert first not in pool.children()


async def test_a_process_that_has_grown_is_replaced_without_a_refusal(pool: Pool) -> None:
    await pool.rendered("ok")
    (first,) = pool.children()
    large = await pool.read(BodyKind.COMPLETION, {"prompt": [[70_000] * 100_000] * 40})
    assert [len(ids) for ids in large.prompts] == [100_000] * 40
    assert await pool.rendered("ok") == "ok"
    assert first not in pool.children()


async def test_a_body_is_not_held_up_by_another_clients_templates(pool: Pool) -> None:
    slow = [asyncio.create_task(pool.rendered(ENDLESS, "slow")) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert await pool.rendered("ok", "other") == "ok"
    in_time(not slow[1].done(), "the client with slow templates has one process, not both")
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_the_body_of_a_client_that_leaves_waits_no_longer(pool: Pool) -> None:
    hanging = [asyncio.create_task(pool.rendered(ENDLESS, f"{number}")) for number in range(4)]
    await until(lambda: pool.pool.waiting == 2)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert pool.pool.waiting == 0


async def test_what_waits_when_the_pool_stops_is_told(pool: Pool) -> None:
    asking = asyncio.create_task(pool.rendered(ENDLESS))
    await asyncio.sleep(0.2)
    await pool.pool.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await asking


async def test_a_pool_that_stops_while_a_process_starts_leaves_none_behind(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = spawning._spawn
    begun = threading.Event()

    def slow(module: str, theirs: socket.socket) -> Any:
        begun.set()
        time.sleep(0.2)
        return spawn(module, theirs)

    monkeypatch.setattr(spawning, "_spawn", slow)
    reading = asyncio.create_task(pool.rendered("ok"))
    await asyncio.to_thread(begun.wait)
    await pool.pool.stop()
    assert not pool.children()
    with pytest.raises((asyncio.CancelledError, OutriderError)):
        await reading


async def test_a_pool_that_stops_before_it_is_connected_to_a_process_leaves_none_behind(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting = asyncio.Event()

    async def endless(**how: Any) -> Any:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", endless)
    reading = asyncio.create_task(pool.rendered("ok"))
    await connecting.wait()
    await pool.pool.stop()
    assert not pool.children()
    with pytest.raises(Unavailable):
        await reading


async def test_the_pool_says_how_long_bodies_took_how_many_wait_and_which_processes_ended(pool: Pool) -> None:
    assert await pool.rendered("ok") == "ok"
    assert (len(pool.seconds), pool.ended, pool.pool.waiting) == (1, [], 0)
    hanging = [asyncio.create_task(pool.rendered(ENDLESS, f"{number}")) for number in range(4)]
    await asyncio.sleep(0.1)
    await until(lambda: pool.pool.waiting == 2)
    while not hanging[0].done():
        for pid in pool.children():
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    with pytest.raises(FieldRefused):
        await hanging[0]
    assert len(pool.ended) >= 1
    assert pool.seconds[-1] >= 0.1
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert len(pool.seconds) == 5
