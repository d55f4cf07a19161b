"""A llama-server gets ids and gives its likeliest ids; a server that is wrong is refused by name."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gguf import GGUFWriter

from outrider.edge.backends import LISTED, TextModel, open_model
from outrider.edge.backends.gguf_vocabulary import vocabulary_digest
from outrider.edge.backends.llama_server import LlamaServerModel
from outrider.edge.top_k import DraftModelFailed
from speculative.errors import InvalidRequest
from tests.edge.fake_llama_server import FakeLlamaServer

TOKENS = ["a", "b", "c", "d"]


def write_vocabulary(path: Path, tokens: list[str]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sum_is_likeliest(ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    best = sum(ids) % len(TOKENS)
    return [(best, math.log(0.6)), ((best + 1) % len(TOKENS), math.log(0.3))]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeLlamaServer]:
    file = write_vocabulary(tmp_path / "model.gguf", TOKENS)
    with FakeLlamaServer(sum_is_likeliest, str(file)) as running:
        yield running


@pytest.fixture
def model(server: FakeLlamaServer) -> Iterator[LlamaServerModel]:
    opened = open_model(server.url)
    assert isinstance(opened, LlamaServerModel)
    yield opened
    opened.close()


def test_ids_go_in_and_the_likeliest_ids_come_out(model: LlamaServerModel, server: FakeLlamaServer) -> None:
    top = model.forward([1, 2])
    assert top.ids.tolist() == [3, 0]
    assert top.logprobs.tolist() == pytest.approx([math.log(0.6), math.log(0.3)])
    model.forward([3])
    model.rewind(1)
    model.forward([0, 0])
    assert [asked["prompt"] for asked in server.asked] == [[1, 2], [1, 2, 3], [1, 0, 0]]
    assert all(asked["n_probs"] == LISTED and asked["n_predict"] == 1 for asked in server.asked)
    assert all(asked["cache_prompt"] for asked in server.asked), "only new ids are computed"


def test_the_server_tells_its_vocabulary_and_context(model: LlamaServerModel) -> None:
    assert model.digest() == vocabulary_digest(TOKENS, [])
    assert model.max_length == 2048


@pytest.mark.parametrize(
    ("rubbish", "why"),
    [
        ("<html>busy</html>", "answered b'<html>busy</html>', which is not JSON"),
        ("[1, 2]", "answered 200"),
        ("{}", "no list of likeliest tokens"),
        ('{"completion_probabilities": []}', "no list of likeliest tokens"),
        ('{"completion_probabilities": [{"top_logprobs": []}]}', "is empty"),
        ('{"completion_probabilities": [{"top_logprobs": [{"id": -1, "logprob": -1}]}]}', "id -1"),
        (
            '{"completion_probabilities": [{"top_logprobs": [{"id": 1.5, "logprob": -1}]}]}',
            "not a whole number",
        ),
        (
            '{"completion_probabilities": [{"top_logprobs": [{"id": 1, "logprob": NaN}]}]}',
            "log-probability nan",
        ),
        ('{"completion_probabilities": [{"top_logprobs": [{"id": 1, "logprob": 7}]}]}', "log-probability 7"),
        (" " * (1 << 21), "answered 200"),
    ],
)
def test_rubbish_is_refused_by_name(
    model: LlamaServerModel, server: FakeLlamaServer, rubbish: str, why: str
) -> None:
    server.rubbish = rubbish
    with pytest.raises(DraftModelFailed, match=why):
        model.forward([1])


def test_an_error_of_the_server_is_passed_on(model: LlamaServerModel, server: FakeLlamaServer) -> None:
    server.status, server.rubbish = 500, '{"error": "out of memory"}'
    with pytest.raises(DraftModelFailed, match=r"/completion answered 500: .*out of memory"):
        model.forward([1])


def test_a_server_that_was_started_again_goes_on(model: LlamaServerModel, server: FakeLlamaServer) -> None:
    model.forward([1])
    server.stop()
    model.close()
    with pytest.raises(DraftModelFailed, match="does not answer"):
        model.forward([2])
    server.start_again()
    model.rewind(0)
    assert model.forward([1, 2]).ids.tolist() == [3, 0]


def test_a_connection_that_the_server_has_closed_is_opened_again(
    model: LlamaServerModel, server: FakeLlamaServer
) -> None:
    server.hangs_up = True
    assert [model.forward([1]).ids[0] for _ in range(4)] == [1, 2, 3, 0]


def test_a_named_vocabulary_that_is_missing_is_named_itself(server: FakeLlamaServer, tmp_path: Path) -> None:
    with pytest.raises(
        DraftModelFailed, match=f"--draft-vocabulary names {tmp_path}/none.gguf, which cannot"
    ):
        open_model(server.url, tmp_path / "none.gguf")


def test_a_server_that_came_back_with_another_vocabulary_is_refused_until_the_vocabulary_is_asked_for(
    model: LlamaServerModel, server: FakeLlamaServer, tmp_path: Path
) -> None:
    server.hangs_up = True
    model.forward([1])
    server.model_path = str(write_vocabulary(tmp_path / "other.gguf", [*TOKENS, "e"]))
    for _ in range(2):
        model.rewind(0)
        with pytest.raises(DraftModelFailed, match="was restarted with a model of another vocabulary"):
            model.forward([1])
    assert model.digest() == vocabulary_digest([*TOKENS, "e"], [])


def test_another_model_behind_the_same_address_is_refused(
    model: LlamaServerModel, server: FakeLlamaServer, tmp_path: Path
) -> None:
    model.forward([1])
    model.close()
    server.model_path = str(write_vocabulary(tmp_path / "other.gguf", [*TOKENS, "e"]))
    model.rewind(0)
    with pytest.raises(DraftModelFailed, match="was restarted with a model of another vocabulary"):
        model.forward([1])


def test_a_vocabulary_that_this_machine_cannot_read_is_asked_for(
    server: FakeLlamaServer, tmp_path: Path
) -> None:
    copy = Path(server.model_path)
    server.model_path = "/models/on-another-machine.gguf"
    with pytest.raises(DraftModelFailed, match=r"cannot be read on this machine .* --draft-vocabulary"):
        open_model(server.url)
    model = open_model(server.url, copy)
    assert model.digest() == vocabulary_digest(TOKENS, [])
    model.close()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("http://", "not the URL"),
        ("no-such-folder", "neither the URL of a llama-server, nor a GGUF file"),
        ("no-such-model.gguf", "nor a GGUF file"),
    ],
)
def test_places_without_a_model_are_refused(place: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        open_model(place)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(DraftModelFailed, match=r"http://127\.0\.0\.1:9 does not answer"):
        open_model("http://127.0.0.1:9")


def test_it_knows_text_as_the_server_does(model: LlamaServerModel, server: FakeLlamaServer) -> None:
    server.answer = lambda ids, count: [(65, -0.1), (66, -3.0)]
    assert isinstance(model, TextModel)
    assert model.encode("ab") == [97, 98]
    model.forward([97, 98])
    assert (model.token_bytes(65), model.token_bytes(67)) == (b"A", b"")
    assert model.end_ids == frozenset()
    server.eos_token = "\x07"
    assert model.end_ids == {7}
    assert model.vocabulary_size == len(TOKENS)
