"""The faulty devices of a chaos run, against two orchestrators: every stream gives its golden output once."""

from typing import Any

import pytest

from benchmarks.chaos import device
from benchmarks.chaos.device import DeviceFault
from benchmarks.chaos.stream_figures import summary
from benchmarks.chaos.traffic import GoldenConversation, RepeatedStreams
from tests.orchestrator.conftest import next_id

PROMPT = (5, 6, 7)
TOKENS = 40


async def test_devices_that_fail_in_every_way_harm_no_stream(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ASLEEP_S", 0.05)
    verifier = await world.verifier()
    settings = {"edge_bind": "127.0.0.1:0"}
    fronts = [await world.ready(await world.front([verifier.address], **settings)) for _ in range(2)]
    golden = tuple(next_id(position) for position in range(len(PROMPT), len(PROMPT) + TOKENS))
    options = {"temperature": 0.0, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True}
    conversation = GoldenConversation((PROMPT,), ((golden,),), options, device=True)
    streams = RepeatedStreams(",".join(front.address for front in fronts), [conversation])
    streams.start()
    await world.until(lambda: all(streams.device_faults[fault] for fault in tuple(DeviceFault)[1:]))
    await streams.finish()
    await streams.close()
    found = summary(streams.records, streams.golden(), [])
    assert found["errors"] == found["differences"] == []
    assert found["identical"] == found["streams"] >= len(DeviceFault)
    assert (found["duplicates"], found["gaps"]) == (0, 0)
    assert found["recoveries"]["orchestrator"] >= 3, "lost connections were resumed"
