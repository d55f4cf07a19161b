"""The models that devices can download, as both fronts list them."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from orchestrator.edge.drafters import read_drafters
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from speculative.errors import InvalidRequest

SMALL = {
    "format": "gguf",
    "url": "https://models.example/small.gguf",
    "bytes": 77_000_000,
    "sha256": "ab" * 32,
    "tokenizer_digest": "",
}


def listed(**changed: Any) -> bytes:
    entry = {name: value for name, value in {**SMALL, **changed}.items() if value != ""}
    return json.dumps({"toy": [entry]}).encode()


async def test_a_model_lists_the_drafters_for_devices(world: Any, table: Any, tmp_path: Path) -> None:
    file = tmp_path / "drafters.json"
    right = {**SMALL, "tokenizer_digest": table.digest}
    file.write_text(json.dumps({"toy": [right, {**SMALL, "tokenizer_digest": "cd" * 32}], "other": []}))
    verifier = await world.verifier(tokens=table)
    front = await world.ready(
        await world.front([verifier.address], edge_drafters_file=file, http_bind="127.0.0.1:0")
    )

    def fetched() -> Any:
        with urllib.request.urlopen(f"{front.http}/v1/models/toy", timeout=60) as reply:
            return json.load(reply)

    model = await asyncio.to_thread(fetched)
    assert model["tokenizer_digest"] == table.digest
    assert model["drafters"] == [right], "one of another vocabulary is of no use"
    async with open_channel(front.address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # a stub of either kind
        (said,) = (await stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert [(it.format, it.bytes, it.url) for it in said.drafters] == [("gguf", SMALL["bytes"], SMALL["url"])]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "edge_drafters_file"),
        (b"[]", "edge_drafters_file"),
        (listed(bytes=0), "toy.0.bytes"),
        (listed(bytes="7"), "toy.0.bytes"),
        (listed(sha256="AB"), "toy.0.sha256"),
        (listed(url=None), "toy.0.url"),
        (listed(license="mit"), "toy.0.license"),
    ],
)
def test_a_file_that_lists_something_else_is_refused(contents: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_drafters({"edge_drafters_file": contents})
