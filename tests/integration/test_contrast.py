"""Contrastive decoding over HTTP, through separate processes: the ids of gRPC, with drafts and without."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from tests.integration.live import REQUEST, Up, start_up

CONTRAST = {"contrast_strength": 0.5, "contrast_plausibility": 0.05}


@pytest.fixture(scope="module")
def contrasting(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    log = tmp_path_factory.mktemp("contrasting") / "stderr"
    pair = ("--target", str(tiny_llama), "--drafter", str(tiny_llama_b))
    stack = start_up(*pair, "--amateur", str(tiny_llama_b), "--retrieval", "none", log=log)
    try:
        stack.wait_ready()
        yield stack
    finally:
        status = stack.stop()
    assert status == 0, stack.log()


def ask(up: Up, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    sent = urllib.request.Request(
        f"{up.http}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_contrast_over_http_gives_the_ids_of_grpc(contrasting: Up, temperature: float) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 11}
    with Client(contrasting.address) as client:
        wanted = client.generate(ids=REQUEST["ids"], **asked, **CONTRAST, speculation=False)
        target_alone = client.generate(ids=REQUEST["ids"], **asked, speculation=False)
    assert wanted.ids != target_alone.ids
    for enabled in (True, False):
        speculation = {"enabled": enabled, "sources": ["lookup", "drafter"] if enabled else None}
        got = ask(
            contrasting,
            prompt=REQUEST["ids"],
            return_token_ids=True,
            speculation=speculation,
            **asked,
            **CONTRAST,
        )
        assert tuple(got["choices"][0]["token_ids"]) == wanted.ids


def test_a_contrast_without_an_amateur_is_refused_by_name(up: Up) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(up, prompt=REQUEST["ids"], max_tokens=4, contrast_strength=0.5)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "contrast_strength")
    assert "has no amateur" in error["message"]
    assert "--amateur" in error["message"]
