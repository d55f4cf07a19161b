"""Programs that use the openai and the anthropic client, blocking and asyncio, in front of real services."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import benchmarks.http.program_scenarios  # adds its scenarios
import benchmarks.http.response_scenarios  # adds its scenarios
import benchmarks.http.tool_scenarios  # noqa: F401  # adds its scenarios
from benchmarks.http import openai_scenarios as scenarios
from benchmarks.http.message_scenarios import MESSAGE_SCENARIOS
from tests.integration.live import Up, start_up

EMBEDDED = Path(__file__).parents[2] / "models" / "target" / "tokenizer_config.json"
TEMPLATE = json.loads(EMBEDDED.read_text())["chat_template"]
"""The embedded pair's template, which has tools."""
CONTEXT = 1024
"""Tokens of a context that has room for the descriptions of tools, which are some 500 tokens here."""


@pytest.fixture(scope="module")
def chatting(tiny_writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`outrider up` with a target that writes any text and has a chat template, drafted for by itself."""
    folder = tmp_path_factory.mktemp("chatting")
    target = folder / "target"
    target.mkdir()
    for file in tiny_writer.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((tiny_writer / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").unlink()
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    config = json.loads((tiny_writer / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    stack = start_up("--target", str(target), "--drafter", str(target), log=folder / "stderr")
    try:
        stack.wait_ready()
        yield stack
    finally:
        assert stack.stop() == 0, stack.log()


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_the_blocking_client(chatting: Up, name: str) -> None:
    with openai.OpenAI(base_url=f"{chatting.http}/v1", api_key="any", max_retries=0) as client:
        scenarios.play(client, client.models.list().data[0].id, name)


def test_the_asyncio_client_plays_all_of_them_at_once(chatting: Up) -> None:
    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{chatting.http}/v1", api_key="any", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            plays = [scenarios.play_async(client, model, name) for name in scenarios.SCENARIOS]
            ended = await asyncio.gather(*plays, return_exceptions=True)
        return [f"{name}: {e!r}" for name, e in zip(scenarios.SCENARIOS, ended, strict=True) if e is not None]

    assert asyncio.run(together()) == []


@pytest.mark.parametrize("name", MESSAGE_SCENARIOS)
def test_the_blocking_client_of_anthropic(chatting: Up, name: str) -> None:
    with anthropic.Anthropic(base_url=chatting.http, api_key="any", max_retries=0) as client:
        scenarios.play(client, client.models.list().data[0].id, name, MESSAGE_SCENARIOS)


def test_the_asyncio_client_of_anthropic_plays_all_of_them_at_once(chatting: Up) -> None:
    async def together() -> list[str]:
        url = chatting.http
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            plays = [
                scenarios.play_async(client, model, name, MESSAGE_SCENARIOS) for name in MESSAGE_SCENARIOS
            ]
            ended = await asyncio.gather(*plays, return_exceptions=True)
        return [f"{name}: {e!r}" for name, e in zip(MESSAGE_SCENARIOS, ended, strict=True) if e is not None]

    assert asyncio.run(together()) == []


def test_a_scenario_can_fail(chatting: Up) -> None:
    def too_much(model: str) -> Any:
        answer = yield scenarios.text(model)
        assert answer.usage.completion_tokens > 8

    scenarios.SCENARIOS["too_much"] = too_much
    try:
        with (
            openai.OpenAI(base_url=f"{chatting.http}/v1", api_key="any", max_retries=0) as client,
            pytest.raises(AssertionError),
        ):
            scenarios.play(client, client.models.list().data[0].id, "too_much")
    finally:
        del scenarios.SCENARIOS["too_much"]
