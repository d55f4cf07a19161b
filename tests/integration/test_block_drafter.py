"""A drafter that writes blocks, behind real services: ids are plain decoding's."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from drafter_service.service import build as build_drafter
from drafter_service.settings import DrafterSettings
from orchestrator.service import build as build_orchestrator
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient
from tests.drafter.test_block import widened
from tests.in_time import in_time
from tests.integration.test_learning import running, served
from verifier_service.service import build as build_verifier
from verifier_service.settings import VerifierSettings

ASKED: list[dict[str, Any]] = [
    {"ids": [5, 9, 30], "temperature": 0.0},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 11},
    {"ids": [7], "temperature": 1.1, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
]


@pytest.mark.usefixtures("quick_switches")
async def test_blocks_change_no_id(tiny_llama: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"threads": 1, "passes": "eager"}
    model = widened(tiny_llama, tmp_path, masks=3)
    async with AsyncExitStack() as stack:
        target = VerifierSettings(model=str(tiny_llama), **given)
        verifier, _ = await stack.enter_async_context(running(build_verifier, target))
        settings = DrafterSettings(model=str(model), drafter="block", **given)
        drafter, service = await stack.enter_async_context(running(build_drafter, settings))
        front = OrchestratorSettings(verifier=(verifier,), drafter=(drafter,))
        address, _ = await stack.enter_async_context(running(build_orchestrator, front))
        client = await stack.enter_async_context(AsyncClient(address))
        await served(client)
        for asked in ASKED:
            options = {**asked, "max_tokens": 60, "ignore_eos": True}
            plain = await client.generate(**options, speculation=False)
            assert (await client.generate(**options)).ids == plain.ids
        in_time(service.worker.counts.nodes_drafted > 0, "the answers were over before")
