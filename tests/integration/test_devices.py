"""A device's drafts through separate processes: the ids are those of plain decoding, whatever it sends."""

import random
from typing import Any

import pytest

from outrider.client import Client
from outrider.v1 import generation_pb2
from tests.edge_device import Answer, Script, draft_along, over_grpc, over_websocket, request_of, window
from tests.integration.live import Up

PROMPT = (5, 9, 30, 41)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
}
TRIES = 100
"""Requests until one's drafts were in time: a busy machine may keep the device from its core meanwhile."""
LONG: dict[str, Any] = {"max_tokens": 96, "seed": 7, "ignore_eos": True}


def right(plain: tuple[int, ...]) -> Script:
    """All windows of 8 at once, each behind the one before: a device that is always right."""
    whole = PROMPT + plain

    def script(have: tuple[int, ...]) -> list[generation_pb2.DeviceDrafts]:
        if have != PROMPT:
            return []
        starts = range(len(PROMPT), len(whole), 8)
        return [window(whole[:start], whole[start : start + 8]) for start in starts]

    return script


def wrong(plain: tuple[int, ...]) -> Script:
    """A window that is wrong from its second token on, behind every commit."""
    whole = PROMPT + plain

    def script(have: tuple[int, ...]) -> list[generation_pb2.DeviceDrafts]:
        ids = [whole[at] if at == len(have) else whole[at] ^ 1 for at in range(len(have), len(whole))][:8]
        return [window(have, ids)] if ids else []

    return script


def rubbish(plain: tuple[int, ...]) -> Script:
    """Well-formed messages of no sense."""
    draw = random.Random(3)

    def script(have: tuple[int, ...]) -> list[generation_pb2.DeviceDrafts]:
        ids = [draw.randrange(60) for _ in range(6)]
        fields = {"base": draw.randrange(200), "prefix_hash": draw.getrandbits(64)}
        return [generation_pb2.DeviceDrafts(ids=ids, survival=bytes(6), **fields), window(have, ids)]  # type: ignore[arg-type]

    return script


async def answer_over_grpc(up: Up, way: dict[str, Any], script: Script, **options: Any) -> Answer:
    async with over_grpc(up.address) as wire:
        return await draft_along(wire, request_of(PROMPT, **LONG, **way, **options), script)


@pytest.mark.parametrize("way", WAYS)
async def test_a_devices_drafts_never_change_the_ids(up: Up, client: Client, way: str) -> None:
    plain = client.generate(ids=PROMPT, **LONG, **WAYS[way], speculation=False).ids
    for make in (right, wrong, rubbish):
        answer = await answer_over_grpc(up, WAYS[way], make(plain), sources=["edge"])
        assert tuple(answer.ids) == plain, make.__name__
        assert answer.started.source_names == ["edge"]


@pytest.mark.parametrize("way", WAYS)
async def test_over_a_websocket_the_ids_are_the_same(up: Up, client: Client, way: str) -> None:
    pytest.importorskip("websockets")
    plain = client.generate(ids=PROMPT, **LONG, **WAYS[way], speculation=False).ids
    async with over_websocket(up.http) as wire:
        for make in (right, wrong, rubbish):
            request = request_of(PROMPT, **LONG, **WAYS[way], sources=["edge"])
            for _ in range(TRIES):
                answer = await draft_along(wire, request, make(plain))
                assert tuple(answer.ids) == plain, make.__name__
                if answer.finished.device.forwarded:
                    break
            assert answer.finished.device.forwarded > 0


async def test_a_device_that_is_right_saves_passes_of_the_target(up: Up, client: Client) -> None:
    plain = client.generate(ids=PROMPT, **LONG, temperature=0.0, speculation=False).ids
    for _ in range(TRIES):
        answer = await answer_over_grpc(up, {"temperature": 0.0}, right(plain), sources=["edge"])
        usage, device = answer.finished.usage, answer.finished.device
        assert tuple(answer.ids) == plain
        if usage.rounds < len(plain) / 2 and device.forwarded == len(plain):
            break
    assert device.nodes == device.forwarded == len(plain)
    assert usage.rounds < len(plain) / 2
    assert usage.accepted_by_source["edge"] == answer.sources.count("edge") > len(plain) / 2


async def test_rounds_that_wait_for_the_device_bring_its_drafts(up: Up, client: Client) -> None:
    plain = client.generate(ids=PROMPT, **LONG, temperature=0.9, speculation=False).ids
    whole = PROMPT + plain

    def slow(have: tuple[int, ...]) -> list[generation_pb2.DeviceDrafts]:
        ids = whole[len(have) : len(have) + 8]
        return [window(have, ids)] if ids else []

    for _ in range(TRIES):
        answer = await answer_over_grpc(up, {"temperature": 0.9}, slow, sources=["edge"], wait_ms=1000)
        assert tuple(answer.ids) == plain
        if answer.finished.usage.rounds < len(plain) / 4:
            break
    assert answer.finished.usage.rounds < len(plain) / 4, "a round per window, and few more"
