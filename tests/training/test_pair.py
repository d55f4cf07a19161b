"""The pair that ships: small enough, exact about text, and in agreement with itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.front.http.bodies.templates import render_conversation
from orchestrator.front.http.chat.conversation import ChatConversation
from training import evaluate, heldout, model, prompts
from training import tokenizer as bpe

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(TARGET)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def texts() -> list[prompts.Prompt]:
    return prompts.read(MODELS / "heldout.jsonl")


def test_the_pair_is_under_40_megabytes_in_files_under_15() -> None:
    sizes = [path.stat().st_size for folder in (TARGET, DRAFTER) for path in folder.iterdir()]
    assert sum(sizes) < 40 * MEGABYTE
    assert max(sizes) < 15 * MEGABYTE


def test_both_folders_carry_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TARGET / name).read_bytes() == (DRAFTER / name).read_bytes()


def test_a_conversation_with_the_pair_is_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == bpe.CHAT
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 7 }}?"}]
    text = render_conversation(tokenizer.chat_template, {}, ChatConversation(messages))
    assert text == "system: Be brief.\nuser: {{ 7 }}?\nassistant:"
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_weights_are_stored_in_bfloat16_and_eos_ends_a_text() -> None:
    for folder, shape in ((TARGET, model.TARGET), (DRAFTER, model.DRAFTER)):
        config = json.loads((folder / "config.json").read_text())
        assert (config["dtype"], config["num_hidden_layers"]) == ("bfloat16", shape.layers)
        assert config["max_position_embeddings"] >= 2048
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 4095


def test_eos_is_one_known_id_and_nothing_is_added_to_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == bpe.EOS
    assert tokenizer.eos_token_id == 4095
    assert tokenizer.bos_token is None
    assert tokenizer("")["input_ids"] == []
    assert tokenizer("x" + bpe.EOS)["input_ids"][1:] == [4095]


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_comes_back_exactly(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    text = random.Random(seed).randbytes(4000).decode("latin-1")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("seed", range(5))
def test_every_unicode_text_comes_back_exactly(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    points = (point for point in random.Random(seed).choices(range(0x110000), k=2000))
    text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


SPACED = [" x", "  a , b . ! 'm n't\n", "\t\r\n \u00a0\u3000 ", "e\u0301 \ufb01 \U0001f40d"]


@pytest.mark.parametrize("text", SPACED)
def test_spaces_and_combining_marks_come_back_exactly(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_held_out_prompt_has_an_origin_a_licence_and_a_fitting_length(
    tokenizer: PreTrainedTokenizerFast, texts: list[prompts.Prompt]
) -> None:
    assert {text.name for text in texts} == set(heldout.NAMES)
    for text in texts:
        assert (text.licence, text.origin.endswith(f"Lib/{text.name}")) == ("PSF-2.0", True)
        assert text.prompt.endswith(":\n")
        assert 90 <= len(tokenizer(text.prompt)["input_ids"]) <= 300
        assert 140 <= len(tokenizer(text.continuation)["input_ids"]) <= 250


def test_the_drafter_agrees_with_the_target_on_held_out_prompts(texts: list[prompts.Prompt]) -> None:
    torch.set_num_threads(1)
    target, drafter = evaluate.load(TARGET), evaluate.load(DRAFTER)
    ids = [bpe.load(TARGET / "tokenizer.json").encode(text.prompt).ids for text in texts[:3]]
    shares = evaluate.agreement(target, drafter, ids, new=24)
    assert 0.2 < shares["top_1"] <= shares["top_2"] <= shares["top_4"] <= 1.0
