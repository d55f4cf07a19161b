"""Loading a model folder: what is read from it, and what is said when that fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.lm.load.model import load_tokenizer
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest, ModelRefused
from tests.lm.families import LENGTH, VOCABULARY, config_of, eager_logits, logits_of, model_of


def changed(folder: Path, target: Path, name: str, **changes: Any) -> Path:
    """A copy of a model folder in which one JSON file is changed."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    content = json.loads((target / name).read_text())
    (target / name).write_text(json.dumps(content | changes))
    return target


def test_a_folder_gives_the_model_its_ids_its_lengths_and_its_tokenizer(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama)

    assert (lm.name, lm.model_type) == ("tiny", "llama")
    assert (lm.vocabulary_size, lm.max_length, lm.eos_ids) == (96, 256, (1,))
    assert lm.tokenizer_json is not None
    tokenizer = Tokenizer.from_str(lm.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode("return left").ids) == "return left"
    assert tokenizer.truncation is None
    assert tokenizer.padding is None
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


def test_a_chat_template_comes_with_the_special_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    plain = changed(tiny_llama, tmp_path / "plain", "tokenizer_config.json", chat_template="{{ messages }}")
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    several = changed(tiny_llama, tmp_path / "several", "tokenizer_config.json", chat_template=named)
    in_a_file = changed(tiny_llama, tmp_path / "file", "tokenizer_config.json")
    (in_a_file / "chat_template.jinja").write_text("from a file")
    parsed = {"start_anchor": "a:", "fields": {"content": {}}}
    answers = {"chat_template": "yes", "response_template": parsed}
    parsing = changed(tiny_llama, tmp_path / "parsing", "tokenizer_config.json", **answers)

    found = [load_tokenizer(str(folder)) for folder in (tiny_llama, plain, several, in_a_file, parsing)]

    chats = [tokenizer.chat for tokenizer in found if tokenizer is not None]
    assert [chat and chat.source for chat in chats] == [None, "{{ messages }}", "yes", "from a file", "yes"]
    assert [chat.response for chat in chats if chat] == ["", "", "", json.dumps(parsed)]
    assert chats[1] is not None
    assert chats[1].tokens == {"eos_token": "<eos>", "pad_token": "<pad>"}


def test_a_loaded_model_computes_what_transformers_does(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    lm = PackedLM.load(str(tiny_llama))
    ids = [5, 9, 2, 40]
    table = lm.table()

    found = logits_of(lm, [SequenceRows(table, ids, range(-1, 3), range(4))])

    own = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    torch.testing.assert_close(found, eager_logits(own, ids), rtol=1e-4, atol=1e-4)


def test_loading_prints_nothing(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    PackedLM.load(tiny_llama)

    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_model_without_a_tokenizer_has_none(tiny_llama_bare: Path) -> None:
    assert PackedLM.load(tiny_llama_bare).tokenizer_json is None


@pytest.mark.parametrize(("given", "read"), [(1, (1,)), ([7, 3, 7], (3, 7)), (None, (5,))])
def test_end_ids_come_from_the_generation_config_else_from_the_config(
    tiny_llama: Path, tmp_path: Path, given: Any, read: tuple[int, ...]
) -> None:
    folder = changed(tiny_llama, tmp_path / "a", "generation_config.json", eos_token_id=given)
    folder = changed(folder, tmp_path / "b", "config.json", eos_token_id=5)
    if given is None:
        (folder / "generation_config.json").unlink()

    assert PackedLM.load(folder, check=False).eos_ids == read


def test_sampling_defaults_come_from_the_generation_config(tiny_llama: Path, tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    folder = changed(tiny_llama, tmp_path / "a", "generation_config.json", **asked)
    assert PackedLM.load(folder, check=False).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert PackedLM.load(tiny_llama, check=False).sampling_defaults == {}


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"no model folder '{tmp_path / 'none'}'"):
        PackedLM.load(tmp_path / "none")


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no config\.json"):
        PackedLM.load(tmp_path)


def test_an_id_that_is_not_in_the_local_cache_is_named_without_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidRequest, match="'nobody/nothing-at-all' was not found"):
        PackedLM.load("nobody/nothing-at-all")


def test_an_unknown_dtype_is_named(tiny_llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="dtype 'int3' is not one of auto, float32, bfloat16"):
        PackedLM.load(tiny_llama, dtype="int3")


def test_broken_weights_are_an_error_that_names_the_folder(tiny_llama: Path, tmp_path: Path) -> None:
    folder = changed(tiny_llama, tmp_path / "a", "config.json")
    (folder / "model.safetensors").write_bytes(b"\x10" * 100)

    with pytest.raises(InvalidRequest, match=f"'{folder}' cannot be loaded"):
        PackedLM.load(folder)


def test_lacking_weights_are_an_error_and_never_random_ones(tiny_llama: Path, tmp_path: Path) -> None:
    folder = changed(tiny_llama, tmp_path / "a", "config.json", num_hidden_layers=3)

    with pytest.raises(InvalidRequest, match=r"lacks 9 of its weights: model\.layers\.2"):
        PackedLM.load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "home_made", "auto_map": {"AutoConfig": "code.Config"}},
            "code from its own repository",
        ),
        ({"model_type": "home_made"}, "this transformers does not know it"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
def test_models_of_the_wrong_kind_are_refused_by_their_type(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelRefused, match=f"{config['model_type']} is not served: .*{message}") as refused:
        PackedLM.load(tmp_path)
    assert refused.value.model_type == config["model_type"]


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "small" / name).write_bytes((tiny_llama / name).read_bytes())

    with pytest.raises(
        ModelRefused, match=f"llama .* its tokenizer gives ids up to 95, it knows {VOCABULARY}"
    ):
        PackedLM.load(tmp_path / "small")


@pytest.mark.parametrize("family", ["falcon", "jamba", "bert"])
def test_the_check_runs_at_load(tmp_path: Path, family: str) -> None:
    model_of(family).save_pretrained(tmp_path)

    with pytest.raises(ModelRefused, match=f"{family} is not served"):
        PackedLM.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "length"), [("dynamic", LENGTH), ("yarn", LENGTH), ("longrope", 40), ("default", LENGTH)]
)
def test_rotary_frequencies_that_depend_on_the_batch_bound_the_context(kind: str, length: int) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    if kind != "default":
        rope |= {"factor": 2.0, "original_max_position_embeddings": LENGTH if kind == "dynamic" else 40}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = model_of("llama", rope_parameters=rope)

    assert PackedLM(model).max_length == length


def test_a_config_without_a_length_is_refused() -> None:
    from outrider.lm.load.model import longest_context

    with pytest.raises(ModelRefused, match="names no longest context"):
        longest_context(config_of("bloom", max_position_embeddings=None))


def test_a_tokenizer_that_cannot_be_read_is_refused_and_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = changed(tiny_llama, tmp_path / "broken", "config.json")
    (folder / "tokenizer.json").write_text('{"x": 1')
    with pytest.raises(InvalidRequest, match=r"broken/tokenizer\.json cannot be read"):
        PackedLM.load(folder)
