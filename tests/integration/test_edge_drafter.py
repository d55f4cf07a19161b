"""Devices that draft with a model of their own get the ids of plain decoding, whatever happens to them."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType

from benchmarks.edge.delayed_link import DelayedLink
from outrider import AsyncEdgeDrafter, EdgeDrafter
from outrider.client import Client
from outrider.edge.backends import open_model
from outrider.edge.backends.torch_model import TorchModel
from outrider.edge.edge_drafter import EdgeStream
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from tests.edge.fake_llama_server import FakeLlamaServer
from tests.integration.live import Up, until

PROMPT = (5, 9, 30, 41)
LONG: dict[str, Any] = {"ids": PROMPT, "max_tokens": 96, "seed": 7, "ignore_eos": True, "sources": ["edge"]}
MODES = ("hinting", "waiting", "pipelined", None)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[TorchModel]:
    """The target itself as a drafter, which is right but for its top-k."""
    opened = open_model(str(tiny_llama))
    assert isinstance(opened, TorchModel)
    yield opened
    opened.close()


class Borrowed:
    """A model that a drafter does not close."""

    def __init__(self, model: TorchModel) -> None:
        model.rewind(0)
        self.name, self.max_length = model.name, model.max_length
        self.forward, self.rewind, self.digest = model.forward, model.rewind, model.digest
        self.encode, self.token_bytes = model.encode, model.token_bytes
        self.vocabulary_size, self.end_ids = model.vocabulary_size, model.end_ids

    def close(self) -> None:
        pass


def plain(client: Client, temperature: float) -> tuple[int, ...]:
    options = {key: value for key, value in LONG.items() if key != "sources"}
    return client.generate(**options, temperature=temperature, speculation=False).ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", MODES)
def test_the_ids_are_those_of_plain_decoding(
    up: Up, client: Client, model: TorchModel, mode: str | None, temperature: float
) -> None:
    expected = plain(client, temperature)
    with EdgeDrafter(up.address, Borrowed(model), mode=mode) as drafter:

        def drafts() -> bool:
            stream = drafter.stream(**LONG, temperature=temperature)
            completion = stream.completion()
            assert completion.ids == expected
            assert stream.device.trouble == ""
            usage = completion.usage.device
            assert usage is not None
            # The last window may come after the answer.
            assert usage.windows <= stream.device.windows
            assert usage.nodes <= stream.device.sent
            return stream.device.drafted > 0 and (mode != "pipelined" or usage.forwarded > 0)

        until(drafts)  # on a busy machine an answer can be over before the device's thread runs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_device_that_is_right_saves_passes_of_the_target(
    up: Up, client: Client, model: TorchModel, temperature: float
) -> None:
    expected = plain(client, temperature)
    with EdgeDrafter(up.address, Borrowed(model), mode="pipelined", preference="economy") as drafter:

        def accepted() -> bool:
            completion = drafter.generate(**LONG, temperature=temperature)
            assert completion.ids == expected
            return completion.usage.accepted_by_source.get("edge", 0) > 8

        until(accepted)  # on a busy machine the drafts may be late for all of a request


async def test_the_same_inside_an_event_loop(up: Up, client: Client, model: TorchModel) -> None:
    expected = await asyncio.to_thread(plain, client, 0.8)
    async with AsyncEdgeDrafter(up.address, Borrowed(model), mode="pipelined") as drafter:
        stream = drafter.stream(**LONG, temperature=0.8)
        second = drafter.stream(**LONG, temperature=0.8)
        completion, other = await asyncio.gather(stream.completion(), second.completion())
    assert completion.ids == other.ids == expected
    assert second.device.trouble == "the device drafts for another request"


def test_a_connection_that_breaks_is_resumed_at_the_next_token(
    up: Up, client: Client, model: TorchModel
) -> None:
    with (
        DelayedLink(up.address, rtt_ms=4.0) as link,
        EdgeDrafter(link.address, Borrowed(model), mode="pipelined") as drafter,
    ):
        stream = drafter.stream(**LONG, temperature=0.8)
        chunks = [next(stream)]
        for _ in range(2):
            link.cut()
            chunks.append(next(stream))
        completion = stream.completion()
    assert completion.ids == plain(client, 0.8)
    assert stream.device.trouble == ""


def test_a_link_that_loses_and_stalls_delays_the_same_ids(up: Up, client: Client, model: TorchModel) -> None:
    with (
        DelayedLink(up.address, rtt_ms=4.0, loss=0.02, seed=3) as link,
        EdgeDrafter(link.address, Borrowed(model), mode="pipelined") as drafter,
    ):
        stream = drafter.stream(**LONG, temperature=0.8)
        next(stream)
        link.rtt_ms = 600.0
        next(stream)
        link.rtt_ms = 4.0
        completion = stream.completion()
    assert completion.ids == plain(client, 0.8)
    assert stream.device.trouble == ""


def test_a_websocket_carries_the_same_requests(up: Up, client: Client, model: TorchModel) -> None:
    pytest.importorskip("websockets")  # which the orchestrator's front needs, and devices do not
    with EdgeDrafter(up.http, Borrowed(model), mode="pipelined") as drafter:
        expected = plain(client, 0.8)

        def drafts() -> bool:
            stream = drafter.stream(**LONG, temperature=0.8)
            completion = stream.completion()
            assert completion.ids == expected
            assert completion.usage.device is not None
            return 0 < completion.usage.device.windows <= stream.device.windows

        until(drafts)  # on a busy machine an answer can be over before the device's thread runs
        assert len(drafter.generate(ids=PROMPT, max_tokens=4, n=2).choices) == 2
        with pytest.raises(InvalidRequest, match="temperature"):
            drafter.generate(ids=PROMPT, temperature=-3)


def test_a_websocket_that_breaks_is_resumed(up: Up, client: Client, model: TorchModel) -> None:
    pytest.importorskip("websockets")
    with (
        DelayedLink(up.http.removeprefix("http://"), rtt_ms=4.0) as link,
        EdgeDrafter(f"http://{link.address}", Borrowed(model), mode="pipelined") as drafter,
    ):
        stream = drafter.stream(**LONG, temperature=0.8)
        next(stream)
        link.cut()
        assert stream.completion().ids == plain(client, 0.8)
        assert stream.explain()["rtt_ms"] is not None


def test_drafting_can_be_turned_off_amid_an_answer(up: Up, client: Client, model: TorchModel) -> None:
    with EdgeDrafter(up.address, Borrowed(model), mode="hinting") as drafter:
        stream = drafter.stream(**LONG, temperature=0.0)
        next(stream)
        stream.use_device(False)
        assert stream.completion().ids == plain(client, 0.0)
        assert stream.device.mode == "cloud"
        assert "off on request" in stream.device.why
        drafter.device_enabled = False
        off = drafter.stream(**LONG, temperature=0.0)
        assert off.completion().ids == plain(client, 0.0)
        assert off.device.sent == 0


def test_requests_that_a_device_cannot_draft_for_say_so(up: Up, model: TorchModel) -> None:
    with EdgeDrafter(up.address, Borrowed(model)) as drafter:
        for options in ({"n": 2}, {"speculation": False}, {"nodes": 0}):
            stream = drafter.stream(ids=PROMPT, max_tokens=4, **options)
            assert stream.completion().ids
            assert "one answer of a request that allows speculation" in stream.device.trouble


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_device_alone_chooses_by_the_targets_rule_and_says_that_it_was_alone(
    up: Up, model: TorchModel, temperature: float
) -> None:
    """The device has the target's own model here, and top-k leaves out no id that the device knows."""
    asked = {**LONG, "temperature": temperature, "top_k": 32}
    with EdgeDrafter(up.address, Borrowed(model)) as drafter:
        alone = drafter.generate_locally(**asked)
        assert alone.provenance == "local"
        stream = drafter.stream(**asked)
        assert stream.completion().ids == alone.ids  # the model drafts again afterwards
        assert stream.device.trouble == ""


def write_vocabulary(path: Path, folder: Path, spoil: bool = False) -> Path:
    """A GGUF file with the vocabulary of a model's folder."""
    table = TokenTable.from_json((folder / "tokenizer.json").read_text())
    tokens = [table.token(id_) for id_ in range(table.size)]
    if spoil:
        tokens[7] += "x"
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def answers_of(model: TorchModel) -> Any:
    """A function that answers as llama.cpp's server would, run by a model."""
    model.rewind(0)
    read: list[int] = []

    def answer(ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        same = 0
        while same < min(len(read), len(ids) - 1) and read[same] == ids[same]:
            same += 1
        model.rewind(same)
        top = model.forward(ids[same:])
        read[:] = ids
        pairs = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
        return [(id_, min(0.0, logprob)) for id_, logprob in pairs][:count]

    return answer


def drafted_by(server: FakeLlamaServer, up: Up, **how: Any) -> tuple[tuple[int, ...], EdgeStream]:
    with EdgeDrafter(up.address, server.url, **how) as drafter:
        stream = drafter.stream(**LONG, temperature=0.8)
        return stream.completion().ids, stream


def test_a_llama_server_drafts_sampled_text(
    up: Up, client: Client, model: TorchModel, tiny_llama: Path, tmp_path: Path
) -> None:
    file = write_vocabulary(tmp_path / "model.gguf", tiny_llama)
    with FakeLlamaServer(answers_of(model), str(file)) as server:
        for _ in range(100):  # on a busy machine an answer can be over before the device's thread runs
            ids, stream = drafted_by(server, up, mode="pipelined")
            assert ids == plain(client, 0.8)
            assert stream.device.trouble == ""
            if stream.device.drafted:
                break
    assert stream.device.drafted > 0


def test_another_vocabulary_is_refused_by_name(
    up: Up, client: Client, model: TorchModel, tiny_llama: Path, tmp_path: Path
) -> None:
    file = write_vocabulary(tmp_path / "other.gguf", tiny_llama, spoil=True)
    with FakeLlamaServer(answers_of(model), str(file)) as server:
        ids, stream = drafted_by(server, up)
    assert ids == plain(client, 0.8)
    assert stream.device.sent == 0
    assert f"{server.url} has vocabulary" in stream.device.trouble
    assert "their ids mean different tokens" in stream.device.trouble


@pytest.mark.parametrize("rubbish", ["", "<html>", '{"completion_probabilities": 7}'])
def test_a_backend_that_answers_rubbish_costs_the_drafts_alone(
    up: Up, client: Client, model: TorchModel, tiny_llama: Path, tmp_path: Path, rubbish: str
) -> None:
    file = write_vocabulary(tmp_path / "model.gguf", tiny_llama)
    with (
        FakeLlamaServer(lambda *_: [(1, math.log(0.5))], str(file)) as server,
        EdgeDrafter(up.address, server.url, mode="pipelined") as drafter,
    ):
        server.rubbish = rubbish
        stream = drafter.stream(**LONG, temperature=0.8)
        assert stream.completion().ids == plain(client, 0.8)
    assert stream.device.sent == 0
