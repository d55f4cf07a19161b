"""`outrider models check`: whether two models fit, and the settings that it recommends."""

import json
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from outrider.cli.app import main
from tests.cli.inside import Ended, Run, ended
from tests.conftest import save_tiny_llama, tiny_tokenizer, writing_tokenizer
from tests.lm.families import model_of

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "models-check.schema.json").read_text())
SMALL = ("--prompts", "2", "--tokens", "8", "--threads", "1")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ended:
        return ended(capsys, "models", "check", *arguments)

    return run


def said(done: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(found, SCHEMA)
    return found


def test_a_model_that_drafts_for_itself_is_always_right(run: Run, tiny_llama: Path) -> None:
    done = run(tiny_llama, tiny_llama, *SMALL, "--json")
    assert done.status == 0, done.err
    found = said(done)
    assert found["fits"] is True
    assert found["tokenizers"] == {"ok": True, "difference": ""}
    assert found["agreement"] == 1.0
    assert found["how"]["prompts"] == 2
    assert {(one["temperature"], one["nodes"]) for one in found["acceptance"]} == {
        (temperature, nodes) for temperature in (0.0, 0.8) for nodes in (4, 8, 16)
    }
    assert found["target"]["max_length"] == 256
    assert found["settings"]["verifier"]["model"] == str(tiny_llama)


def test_a_search_adds_the_drafter_s_fastest_settings(
    run: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two equal models: a drafter as dear as its target is recommended only if no gain is asked for.
    monkeypatch.setattr("outrider.pair.advice.WORTH", 0.0)
    few = ("--prompts", "1", "--tokens", "4", "--threads", "1")
    found = said(run(tiny_llama, tiny_llama, *few, "--search", "--json"))
    tuning = found["search"]["tuning"]
    assert tuning.items() <= found["settings"]["drafter"].items()
    assert found["search"]["speedup"] >= found["search"]["default_speedup"] > 0
    assert found["search"]["tried"] > 10


def test_a_drafter_that_is_often_wrong_agrees_less_and_the_report_says_so(
    run: Run, tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("for index, value in enumerate(values):\n    print(index, value)\n" * 8)
    found = said(run(tiny_llama, tiny_llama_b, *SMALL, "--text", text, "--json"))
    assert found["agreement"] < 1
    assert found["how"]["text"] == str(text)


def test_the_text_report_ends_in_a_valid_configuration_file(
    run: Run, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "lláma 😀")
    done = run(folder, folder, *SMALL)
    assert done.status == 0
    assert "tokenizers  fit" in done.out
    assert "timing passes" in done.err
    file = tmp_path / "outrider.toml"
    file.write_text(done.out[done.out.index("[verifier]") :])
    read = tomllib.loads(file.read_text())
    assert (read["verifier"]["threads"], read["verifier"]["model"]) == (1, str(folder))
    with pytest.raises(SystemExit) as end:
        main(["config", "check", str(file)])
    assert end.value.code == 0, capsys.readouterr().out


def test_the_suggested_command_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "my models" / "target"
    target.parent.mkdir()
    target.symlink_to(ROOT / "models/target")
    *_, measure = ended(capsys, "models", "suggest", target).out.splitlines()
    assert shlex.split(measure)[:-1] == ["measure", "outrider", "models", "check", str(target)]


def test_different_tokenizers_are_reported_with_the_first_difference(
    run: Run, tiny_llama: Path, tiny_writer: Path
) -> None:
    done = run(tiny_llama, tiny_writer, *SMALL, "--json")
    assert done.status == 1
    found = said(done)
    assert (found["fits"], found["costs"], found["acceptance"]) == (False, None, [])
    assert found["tokenizers"]["difference"].startswith("id 2 is \"'\" in the target's and ")
    assert (found["target"]["type"], found["target"]["max_length"]) == ("llama", 0)
    plain = run(tiny_llama, tiny_writer, *SMALL)
    assert "loading" not in plain.err, "it was found before a model was loaded"
    assert f"target      {tiny_llama}: llama, not loaded" in plain.out
    assert plain.status == 1
    assert "do not fit: id 2" in plain.out
    assert "cannot be served together" in plain.out


def test_a_model_without_a_tokenizer_is_reported(run: Run, tiny_llama: Path, tiny_llama_bare: Path) -> None:
    found = said(run(tiny_llama, tiny_llama_bare, *SMALL, "--json"))
    assert "the drafter came without a tokenizer" in found["tokenizers"]["difference"]


def test_a_model_that_is_refused_at_load_is_reported_with_the_reason(
    run: Run, tiny_writer: Path, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "narrow", seed=0, tokenizer=writing_tokenizer(), width=200)
    done = run(folder, tiny_writer, *SMALL, "--json")
    assert done.status == 1
    found = said(done)
    assert "its tokenizer gives ids up to" in found["target"]["refusal"]
    assert found["settings"] == {}


@pytest.mark.slow
def test_a_target_with_states_is_measured_by_the_chains_that_its_verifier_runs(
    run: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "hybrid", ignore=shutil.ignore_patterns("*.safe*")))
    model_of("lfm2", vocab_size=96, eos_token_id=1).save_pretrained(folder)
    found = said(run(folder, tiny_llama, *SMALL, "--json"))
    assert found["fits"] is True
    assert (found["target"]["type"], found["target"]["shape"]) == ("lfm2", "chains")
    assert found["drafter"]["shape"] == "trees"
    assert "kv_mb" not in found["settings"]["verifier"], "no count of ids tells what states take"
    assert ", verifies chains\n" in run(folder, tiny_llama, *SMALL).out
    refused = said(run(tiny_llama, folder, *SMALL, "--json"))
    assert refused["fits"] is False
    assert refused["drafter"]["refusal"].startswith("lfm2 is not served: ")


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (("--dtype", "int3"), 1, "dtype 'int3' is not one of auto, float32"),
        (("--text", "/nowhere"), 2, "--text '/nowhere' is not a file"),
        (("--threads", "0"), 2, "--threads"),
        (("--device", "abacus"), 1, "abacus"),
    ],
)
def test_a_pair_that_cannot_be_checked_is_refused_with_the_reason(
    run: Run, tiny_llama: Path, flags: tuple[str, ...], status: int, says: str
) -> None:
    done = run(tiny_llama, tiny_llama, *flags, "--json")
    assert done.status == status
    assert says in json.loads(done.out)["error"]["message"]


def test_an_incomplete_model_folder_is_named(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    half = Path(shutil.copytree(tiny_llama, tmp_path / "half"))
    (half / "model.safetensors").unlink()
    done = run(tiny_llama, half)
    assert done.status == 1
    assert f"'{half}' has no weights" in done.err
    assert "loading" not in done.err, "it was found before the target was loaded"


@pytest.mark.parametrize("missing", ["/nowhere/model", "models/nowhere", "./nowhere"])
def test_both_models_are_looked_for_before_one_is_loaded(
    run: Run, tiny_llama: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for pair in ((tiny_llama, missing), (missing, tiny_llama)):
        done = run(*pair)
        assert done.status == 1
        assert repr(missing) in done.err
        assert "loading" not in done.err


def test_a_wider_drafter_with_the_same_tokenizer_fits(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    """Models are padded to round widths; ids that no token has are never drafted."""
    tokenizer: Tokenizer = tiny_tokenizer()
    wide = save_tiny_llama(tmp_path / "wide", seed=1, tokenizer=tokenizer, width=128)
    assert said(run(tiny_llama, wide, *SMALL, "--json"))["fits"] is True


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_embedded_pair_is_recommended_with_its_drafter(run: Run) -> None:
    flags = ("--threads", "1", "--prompts", "4", "--tokens", "24", "--json")
    found = said(run(ROOT / "models/target", ROOT / "models/drafter", *flags))
    assert found["agreement"] > 0.4
    assert found["costs"]["drafter_to_target"] < 0.5
    assert found["advice"]["drafter"] is True
    assert found["advice"]["expected_speedup"] > 1.05
    assert found["settings"]["drafter"]["model"].endswith("models/drafter")
