"""Conversations with a model that reasons come through the local endpoint as the cloud answers them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.endpoint.cloud import Cloud
from outrider.edge.endpoint.server import EdgeEndpoint
from tests.conftest import save_tiny_llama, writing_tokenizer
from tests.integration.live import Up, start_up

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}<think>{# </think> #}"
ASKED: dict[str, Any] = {
    "model": "target",
    "messages": [{"role": "user", "content": "How warm is it?"}],
    "max_tokens": 24,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reasoning") / "target"
    save_tiny_llama(folder, seed=3, tokenizer=writing_tokenizer(), width=320)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def reasoning(target: Path) -> Iterator[Up]:
    stack = start_up("--target", str(target), "--drafter", str(target), log=target.parent / "stderr")
    try:
        stack.wait_ready()
        yield stack
    finally:
        assert stack.stop() == 0, stack.log()


@pytest.mark.slow
def test_reasoning_is_no_content_with_the_device_either(reasoning: Up, target: Path) -> None:
    answers = []
    with (
        EdgeDrafter(reasoning.address, str(target), mode="pipelined") as drafter,
        EdgeEndpoint(drafter, Cloud(reasoning.http)) as endpoint,
    ):
        for url in (reasoning.http, endpoint.url):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                message = client.chat.completions.create(**ASKED).choices[0].message
            answers.append((message.content, (message.model_extra or {}).get("reasoning_content")))
    assert answers[0][1]
    assert answers[1] == answers[0]
