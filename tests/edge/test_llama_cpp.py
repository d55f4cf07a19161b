"""llama.cpp in this process: what is read again after a rewind, and real GGUF files where it is installed."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.edge.backends import TextModel, open_model
from outrider.edge.backends.llama_cpp import CHUNK, LlamaCppModel
from outrider.edge.top_k import DraftModelFailed
from speculative.errors import InvalidRequest
from speculative.hashing import prefix_hash
from tests.edge.test_gguf_vocabulary import write as write_gguf

WIDTH = 97
DRAFTER = Path(__file__).parents[2] / "models" / "drafter"


class SequenceMemory:
    """A stand-in for llama.cpp's memory: its logits are a function of all ids read.

    Args:
        can_cut: whether the memory can forget a part; that of a recurrent model cannot.
    """

    width = WIDTH
    end_ids = frozenset((WIDTH - 1,))

    def __init__(self, can_cut: bool = True) -> None:
        self.ids: list[int] = []
        self.calls: list[int] = []
        self.closed = False
        self._can_cut = can_cut

    def decode(self, ids: Sequence[int]) -> NDArray[np.float32]:
        assert 0 < len(ids) <= CHUNK
        self.ids.extend(ids)
        self.calls.append(len(ids))
        row = np.zeros(WIDTH, np.float32)
        row[prefix_hash(self.ids) % WIDTH] = 5.0
        return row

    def cut(self, to: int) -> bool:
        if to and not self._can_cut:
            return False
        del self.ids[to:]
        return True

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def piece(self, id_: int) -> bytes:
        return bytes([id_])

    def close(self) -> None:
        self.closed = True


def best(model: LlamaCppModel, ids: Sequence[int]) -> int:
    return int(model.forward(ids).ids[0])


def model_over(memory: SequenceMemory) -> LlamaCppModel:
    return LlamaCppModel(memory, "toy.gguf", 512, "d" * 64)


@pytest.mark.parametrize("can_cut", [True, False])
def test_after_a_rewind_the_answer_is_that_of_the_ids_left(can_cut: bool) -> None:
    memory = SequenceMemory(can_cut)
    model = model_over(memory)
    model.forward([1, 2, 3, 4])
    model.rewind(2)
    assert best(model, [7]) == prefix_hash([1, 2, 7]) % WIDTH
    model.rewind(3)  # forgets nothing
    model.rewind(0)
    assert best(model, [9]) == prefix_hash([9]) % WIDTH


def test_a_memory_that_can_be_cut_reads_only_what_is_new() -> None:
    memory = SequenceMemory()
    model = model_over(memory)
    model.forward([1, 2, 3, 4])
    model.rewind(2)
    model.forward([7])
    assert memory.calls == [4, 1]


def test_rewinds_behind_one_another_before_a_call_lose_nothing() -> None:
    memory = SequenceMemory(can_cut=False)
    model = model_over(memory)
    model.forward([1, 2, 3, 4, 5])
    model.rewind(4)
    model.rewind(3)
    assert best(model, [8]) == prefix_hash([1, 2, 3, 8]) % WIDTH


def test_a_long_prompt_is_read_in_chunks() -> None:
    memory = SequenceMemory()
    ids = list(range(2 * CHUNK + 3))
    assert best(model_over(memory), ids) == prefix_hash(ids) % WIDTH
    assert memory.calls == [CHUNK, CHUNK, 3]


def test_it_has_the_digest_it_was_given_and_frees_its_memory() -> None:
    memory = SequenceMemory()
    model = model_over(memory)
    assert model.digest() == "d" * 64
    model.close()
    assert memory.closed


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    file = write_gguf(tmp_path / "model.gguf", ["a", "b"])
    with pytest.raises(InvalidRequest, match=r"outrider\[edge-llama\].*`llama-server --model") as refused:
        open_model(str(file))
    assert "8080" in str(refused.value)


def test_a_file_that_is_no_gguf_file_is_refused_before_llama_cpp_sees_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"rubbish")
    with pytest.raises(DraftModelFailed, match="cannot be read as a GGUF file"):
        open_model(str(file))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded drafter as a GGUF file."""
    pytest.importorskip("llama_cpp")
    file = tmp_path_factory.mktemp("gguf") / "drafter.gguf"
    command = [sys.executable, "-m", "benchmarks.peers.gguf_models", str(DRAFTER), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file


def test_a_converted_model_answers_as_the_original_does(converted: Path) -> None:
    ours, original = open_model(str(converted)), open_model(str(DRAFTER))
    try:
        assert ours.digest() == original.digest()
        ids = [11, 48, 200, 7, 1024, 5]
        for reading in (ids, [9], [77, 3]):
            here, there = ours.forward(reading), original.forward(reading)
            assert here.ids[:4].tolist() == there.ids[:4].tolist()
            assert np.abs(here.logprobs[:4] - there.logprobs[:4]).max() < 0.02
        for model in (ours, original):
            model.rewind(3)
        assert ours.forward([200]).ids[0] == original.forward([200]).ids[0]
    finally:
        ours.close()
        original.close()


def test_texts_have_the_ids_and_the_bytes_of_the_original(converted: Path) -> None:
    ours, original = open_model(str(converted)), open_model(str(DRAFTER))
    try:
        assert isinstance(ours, TextModel)
        assert isinstance(original, TextModel)
        for text in ("def fib(n):\n    return n", "naïve = '€'  # ½"):
            ids = ours.encode(text)
            assert ids == original.encode(text)
            assert b"".join(map(ours.token_bytes, ids)) == text.encode()
        assert ours.end_ids == original.end_ids
        assert ours.vocabulary_size == original.vocabulary_size
    finally:
        ours.close()
        original.close()


def test_an_id_beyond_the_models_vocabulary_is_an_error(converted: Path) -> None:
    model = open_model(str(converted))
    try:
        with pytest.raises(DraftModelFailed, match="outside the model's vocabulary"):
            model.forward([1_000_000])
        model.rewind(0)
        assert len(model.forward([5]).ids)
    finally:
        model.close()


def test_a_file_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    file = write_gguf(tmp_path / "empty.gguf", ["a", "b"])
    with pytest.raises(DraftModelFailed, match="cannot load the model"):
        open_model(str(file))
