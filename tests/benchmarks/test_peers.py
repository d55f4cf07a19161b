"""The comparison with transformers and llama.cpp: its figures, its GGUF files, and a small run."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.peers.__main__ import llama_flags
from benchmarks.peers.llama_server import LlamaServer, find_program
from benchmarks.peers.peer_figures import (
    Runs,
    Setting,
    best_over_llama,
    identical,
    ids_equal_generate,
    over_generate,
    plain_over_llama,
    rates,
    streams_of,
)
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.figures import TimedRun
from benchmarks.shared.hf_peer import decode, load
from benchmarks.vocabulary.random_model import tokenizer_of_size

VOCABULARY = 320
LLAMA_SERVER = shutil.which("llama-server")


def run(arm: str, prompt: int, ids: tuple[int, ...], seconds: float, repeat: int = 0) -> TimedRun:
    return TimedRun(arm, prompt, repeat, ids, seconds)


def alone(threads: int = 1, temperature: float = 0.0) -> Setting:
    return Setting(temperature, 1, threads)


def test_a_batch_falls_into_the_streams_of_its_prompts() -> None:
    batch = run("llama_plain", 1, (1, 2, 3, 4), 1.0)

    streams = streams_of(Setting(0.0, 2, 1), [batch])

    assert [(stream.prompt, stream.ids) for stream in streams] == [(2, (1, 2)), (3, (3, 4))]


def test_the_share_of_equal_ids_counts_streams_of_a_batch_one_by_one() -> None:
    runs: Runs = {
        alone(): [run("hf_generate", 0, (1, 2), 1.0), run("hf_generate", 1, (3, 4), 1.0)],
        Setting(0.0, 2, 1): [
            run("hf_generate", 0, (1, 2, 3, 4), 1.0),
            run("llama_plain", 0, (1, 2, 3, 5), 1.0),
        ],
        alone(temperature=0.8): [run("llama_plain", 0, (9, 9), 1.0)],
    }

    assert ids_equal_generate(runs) == {"hf_generate": 1.0, "llama_plain": 0.5}


def test_our_arms_are_identical_only_if_every_setting_agrees() -> None:
    def plain(ids: tuple[int, ...]) -> list[TimedRun]:
        return [run("outrider_plain", 0, ids, 1.0)]

    arms = ["outrider_plain"]

    assert identical({alone(1): plain((1, 2)), alone(2): plain((1, 2))}, 0.0, arms)
    assert not identical({alone(1): plain((1, 2)), alone(2): plain((1, 3))}, 0.0, arms)


def test_rates_stand_below_arm_temperature_streams_and_threads() -> None:
    runs: Runs = {alone(2): [run("hf_generate", 0, (1, 2), 0.5), run("outrider_plain", 0, (1, 2), 0.25)]}

    assert rates(runs)["outrider_plain"] == {"0.0": {"1": {"2": 8.0}}}
    assert over_generate(runs) == {"outrider_plain": {"0.0": {"1": {"2": 2.0}}}}


def test_the_best_of_both_sides_may_have_different_threads() -> None:
    runs: Runs = {
        alone(1): [run("outrider_speculative", 0, (1, 2), 0.5), run("llama_plain", 0, (1, 2), 1.0)],
        alone(2): [run("outrider_speculative", 0, (1, 2), 1.0), run("llama_ngram", 0, (1, 2), 0.25)],
    }

    best = best_over_llama(runs)["0.0"]["1"]

    assert (best["speculative"], best["llama"]) == ("outrider_speculative x1", "llama_ngram x2")
    assert best["ratio"]["median"] == 0.5


def test_a_wrong_path_of_the_server_is_named() -> None:
    with pytest.raises(SystemExit, match="--llama-server /nowhere/llama: there is no program"):
        find_program("/nowhere/llama")


@pytest.fixture(scope="module")
def narrow_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of 2 layers whose head width is not width / heads."""
    folder = tmp_path_factory.mktemp("peers") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = tokenizer_of_size(VOCABULARY)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(narrow_llama: Path) -> Path:
    """The GGUF file of the random Llama; skips where the gguf package is not installed."""
    pytest.importorskip("gguf", reason="the extra [bench] is not installed")
    from benchmarks.peers.gguf_models import write_gguf

    file = narrow_llama.parent / "llama.gguf"
    write_gguf(narrow_llama, file)
    return file


def test_a_gguf_file_holds_the_checkpoints_numbers_shape_and_tokens(
    narrow_llama: Path, converted: Path
) -> None:
    from gguf import GGUFReader

    model = LlamaForCausalLM.from_pretrained(narrow_llama, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(narrow_llama)
    reader = GGUFReader(converted)
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    # 9 for each layer, the embedding and the last norm; the tied head is no tensor of its own.
    assert len(tensors) == 2 * 9 + 2
    assert np.array_equal(tensors["token_embd.weight"], own["model.embed_tokens.weight"])
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], own["model.layers.1.mlp.down_proj.weight"])
    # Halves of a head are rotated together: rows 0 and 8 of the first head stand side by side.
    query = own["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(tensors["blk.0.attn_q.weight"][:4], query[[0, 8, 1, 9]])
    assert reader.fields["llama.attention.key_length"].contents() == 16
    assert reader.fields["tokenizer.ggml.tokens"].contents() == [
        tokenizer.convert_ids_to_tokens(id_) for id_ in range(VOCABULARY)
    ]


def test_llama_runs_over_bfloat16_only_where_the_checkpoint_is_stored_so(narrow_llama: Path) -> None:
    assert {"plain_bf16", "ngram_bf16"} < set(llama_flags(str(MODELS / "target")))
    assert set(llama_flags(str(narrow_llama))) == {"plain", "draft", "ngram"}


def test_plain_decoding_is_compared_with_the_faster_of_llamas_plain_arms() -> None:
    runs: Runs = {
        alone(): [
            run("outrider_plain", 0, (1, 2), 1.0),
            run("llama_plain", 0, (1, 2), 4.0),
            run("llama_plain_bf16", 0, (1, 2), 2.0),
        ]
    }

    assert plain_over_llama(runs)["0.0"]["1"]["1"]["median"] == 2.0


def test_a_gguf_file_in_bfloat16_rounds_matrices_and_keeps_vectors(
    narrow_llama: Path, converted: Path, tmp_path: Path
) -> None:
    from gguf import GGUFReader

    from benchmarks.peers.gguf_models import write_gguf

    write_gguf(narrow_llama, tmp_path / "small.gguf", bfloat16=True)
    small, floats = (
        {tensor.name: tensor for tensor in GGUFReader(file).tensors}
        for file in (tmp_path / "small.gguf", converted)
    )
    assert small.keys() == floats.keys()
    for name, tensor in small.items():
        expected = torch.from_numpy(np.array(floats[name].data))
        found = torch.from_numpy(np.array(tensor.data))
        if expected.dim() > 1:
            expected = expected.bfloat16()
            found = found.view(torch.bfloat16).view(expected.shape)
        assert torch.equal(found, expected)


def test_what_cannot_be_converted_is_refused_before_anything_is_loaded(
    narrow_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="the extra [bench] is not installed")
    from benchmarks.peers.gguf_models import check_paths

    with pytest.raises(SystemExit, match=r"nope is no folder of a model: it has no config\.json"):
        check_paths(Path("nope"), tmp_path / "x.gguf")
    with pytest.raises(SystemExit, match=r"there is no folder .*/nowhere; make it first"):
        check_paths(narrow_llama, tmp_path / "nowhere" / "x.gguf")
    with pytest.raises(SystemExit, match="is a folder; name the GGUF file"):
        check_paths(narrow_llama, tmp_path)


def test_the_converter_names_the_file_that_it_wrote_and_a_mistyped_folder(
    narrow_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the extra [bench] is not installed")
    from benchmarks.peers import gguf_models

    file = tmp_path / "x.gguf"
    monkeypatch.setattr(sys, "argv", ["gguf_models", str(narrow_llama), str(file)])
    gguf_models.main()

    assert capsys.readouterr().out == f"wrote {file}, {file.stat().st_size / 2**20:.1f} MiB\n"
    monkeypatch.setattr(sys, "argv", ["gguf_models", f"{narrow_llama}s", str(file)])
    with pytest.raises(SystemExit, match="is no folder of a model"):
        gguf_models.main()


def test_a_model_that_the_converter_cannot_read_is_refused_in_one_line(
    narrow_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the extra [bench] is not installed")
    from benchmarks.peers import gguf_models

    for name in ("config.json", "tokenizer.json"):
        shutil.copy(narrow_llama / name, tmp_path)
    monkeypatch.setattr(sys, "argv", ["gguf_models", str(tmp_path), str(tmp_path / "x.gguf")])

    with pytest.raises(SystemExit, match=r"^.* cannot be converted to .*no file named model\.safetensors.*$"):
        gguf_models.main()


@pytest.mark.skipif(LLAMA_SERVER is None, reason="there is no llama-server on PATH")
def test_llama_cpp_decodes_a_converted_model_as_transformers_does(
    narrow_llama: Path, converted: Path
) -> None:
    assert LLAMA_SERVER is not None
    model = LlamaForCausalLM.from_pretrained(narrow_llama, dtype=torch.float32)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    greedy = {"n_predict": 12, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    with LlamaServer(LLAMA_SERVER, converted, 2, 1, ["--flash-attn", "off"]) as server:
        server.wait_ready()
        made, _ = server.complete([{"prompt": prompt, **greedy} for prompt in prompts])

    for prompt, ids in zip(prompts, made, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert list(ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.long
def test_the_peers_benchmark_prints_what_its_schema_says_and_finds_our_ids_identical(
    bench: Callable[..., dict[str, Any]],
) -> None:
    result = bench(
        *("peers", "--prompts", "2", "--streams", "1,2", "--threads", "1", "--tokens", "8", "--repeats", "1")
    )

    assert result["identical"] is True
    assert result["sampled_identical"] is True
    assert set(result["tokens_per_second"]["hf_generate"]["0.0"]) == {"1", "2"}
    assert ("llama_plain" in result["tokens_per_second"]) == (LLAMA_SERVER is not None)
    assert ("llama.cpp" in result["left_out"]) == (LLAMA_SERVER is None)


@pytest.mark.parametrize("method", ["assisted", "prompt_lookup", "early_exit"])
def test_each_way_of_transformers_to_speculate_decodes_greedily_as_generate_does(method: str) -> None:
    target, drafter = (load(str(MODELS / name), True) for name in ("target", "drafter"))
    request = {"batch": [list(range(40, 60))], "max_tokens": 8, "temperature": 0.0, "seed": 1, "threads": 1}

    plain = decode(target, drafter, request | {"method": "generate"})

    assert decode(target, drafter, request | {"method": method})["ids"] == plain["ids"]
