"""How settings name the Redis server, and that an orchestrator never shows its password."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.settings import OrchestratorSettings
from outrider.runtime.settings import read_settings
from speculative.errors import InvalidRequest

SECRET = "hunter2-of-redis"


async def test_the_url_can_come_from_a_file(world: Any, redis_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(f"{redis_server.url}\n")
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address], store="redis", redis_url_file=str(file)))
    await front.client.generate(ids=[5], session="mine", max_tokens=4)
    await world.until(lambda: front.sample("store_sessions") == 0)
    assert front.sample("store_failures_total") == 0


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"store": "redis"}, "nobody says where"),
        ({"store": "memory", "redis_url": "redis://h:1"}, "store is memory"),
        ({"store": "redis", "redis_url": f"http://:{SECRET}@h:1"}, "the Redis URL is none"),
    ],
)
async def test_what_contradicts_itself_is_refused(world: Any, how: dict[str, str], what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as refused:
        await world.front(["127.0.0.1:1"], **how)
    assert SECRET not in str(refused.value)


def test_no_password_is_in_settings_as_they_are_shown() -> None:
    settings = read_settings(
        OrchestratorSettings,
        ["--verifier", "h:1", "--store", "redis", "--redis-url", f"redis://:{SECRET}@h:1"],
        {},
    )
    assert SECRET not in repr(settings)
    assert SECRET not in settings.model_dump_json()


async def test_no_password_is_in_what_is_logged_of_a_lost_store(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    verifier = await world.verifier()
    url = f"redis://:{SECRET}@127.0.0.1:1"
    front = await world.ready(await world.front([verifier.address], store="redis", redis_url=url))
    await front.client.generate(ids=[5], max_tokens=4)
    await world.until(lambda: "store lost" in caplog.text)
    assert SECRET not in caplog.text
    assert all(SECRET not in str(record.__dict__) for record in caplog.records)


def test_an_orchestrator_that_keeps_sessions_in_memory_imports_no_redis() -> None:
    code = (
        "import sys, orchestrator.service\n"
        "from orchestrator.store import open_store\n"
        "open_store('memory'); print('redis' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
