"""The models of `up` and of `models suggest`, against a hub on this machine: what is chosen and fetched."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shared.local_hub import LocalHub
from outrider.cli.failures import CommandFailed
from outrider.cli.local.models import ReadyModels, ready_models
from outrider.cli.local.up_settings import EMBEDDED, StackOptions
from outrider.hub.finding import find_model
from speculative.errors import InvalidRequest
from tests.cli.inside import Run, ended
from tests.conftest import tiny_tokenizer, writing_tokenizer
from tests.hub.conftest import point_at

SIZES = {"Qwen/Qwen3-8B": 90_000, "Qwen/Qwen3-0.6B": 9_000, "Qwen/Qwen3-1.7B": 12_000, "me/own": 90_000}


class Unseen:
    """A view that keeps the names of what is downloaded."""

    def __init__(self) -> None:
        self.models: list[str] = []

    def began(self, model: str, size: int) -> None:
        self.models.append(model)

    def arrived(self, count: int) -> None: ...

    def stalled(self, seconds: float) -> None: ...

    def ended(self) -> None: ...


def save(folder: Path, size: int, *, tokenizer: str, **config: object) -> Path:
    """A folder with a configuration, a tokenizer, and `size` bytes in place of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(bytes(size))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, tokenizer = tmp_path_factory.mktemp("hub"), tiny_tokenizer().to_str()
    return {name: save(root / name, size, tokenizer=tokenizer) for name, size in SIZES.items()}


@pytest.fixture
def hub(folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub(folders) as hub:
        point_at(hub, monkeypatch)
        yield hub


@pytest.fixture
def suggest(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: ended(capsys, "models", "suggest", *arguments)


def ready(target: str, drafter: str = "", *, serve: bool = False) -> tuple[ReadyModels, list[str], list[str]]:
    """The models, what was downloaded and what was said."""
    view, said = Unseen(), list[str]()
    found = ready_models(StackOptions(target=target, drafter=drafter, serve_drafter=serve), view, said.append)
    return found, view.models, said


def test_auto_takes_the_smallest_of_the_family_and_says_so(hub: LocalHub, cache: Path) -> None:
    found, downloaded, said = ready("Qwen/Qwen3-8B")
    assert downloaded == ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"]
    assert said == [
        "the drafter is Qwen/Qwen3-0.6B: the smallest model of the family Qwen3, 9 kB to download; "
        "--drafter none does without"
    ]
    assert found.options.models() == ("Qwen/Qwen3-8B", ("Qwen/Qwen3-0.6B",))
    assert Path(found.options.target_folder).is_relative_to(cache)


def test_a_second_start_downloads_nothing_and_needs_no_hub(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    hub.wrong.status = 503
    found, downloaded, said = ready("Qwen/Qwen3-8B")
    assert (downloaded, found.options.drafter) == ([], "Qwen/Qwen3-0.6B")
    assert "comes from the cache: the hub is out of reach" in said[0]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert ready("Qwen/Qwen3-8B", "none")[0].options.models() == ("Qwen/Qwen3-8B", ())
    with pytest.raises(InvalidRequest, match=r"HF_HUB_OFFLINE is set: unset it, or run `hf download me/own`"):
        ready("me/own")


def test_a_model_of_another_tokenizer_is_passed_over_with_the_reason(
    hub: LocalHub, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = save(tmp_path / "other", 9_000, tokenizer=writing_tokenizer().to_str())
    hub.models["Qwen/Qwen3-0.6B"] = type(hub.models["me/own"])("Qwen/Qwen3-0.6B", other)
    found, _, said = ready("Qwen/Qwen3-8B")
    assert found.options.drafter == "Qwen/Qwen3-1.7B"
    assert said[0].startswith("Qwen/Qwen3-0.6B does not draft: its tokenizer differs: id 2 is")


def test_a_model_without_a_family_gets_the_smallest_of_its_tokenizer_from_this_machine(
    hub: LocalHub, tmp_path: Path
) -> None:
    assert ready("me/own")[0].drafter == (
        "none: no smaller model of the target's tokenizer is known here: lookup drafts alone"
    )
    tokenizer = tiny_tokenizer().to_str()
    target = save(tmp_path / "weights" / "target", 90_000, tokenizer=tokenizer)
    sibling = save(tmp_path / "weights" / "sibling", 8_000, tokenizer=tokenizer)
    save(tmp_path / "weights" / "nearly-as-large", 80_000, tokenizer=tokenizer)
    save(tmp_path / "weights" / "stranger", 5_000, tokenizer=writing_tokenizer().to_str())
    found, downloaded, _ = ready(str(target))
    assert (found.options.drafter, downloaded) == (str(sibling), [])
    assert found.drafter == f"{sibling}: the smallest model on this machine that has the target's tokenizer"


@pytest.mark.parametrize("drafter", ["auto", "none"])
def test_a_drafter_to_serve_that_is_not_there_is_refused_before_weights_are_sent(
    hub: LocalHub, drafter: str
) -> None:
    with pytest.raises(CommandFailed, match="--serve-drafter needs a drafter"):
        ready("me/own", drafter, serve=True)
    assert not hub.sent["model.safetensors"]


def test_a_cached_model_drafts_for_a_target_from_the_hub(hub: LocalHub) -> None:
    ready("Qwen/Qwen3-0.6B", "none")
    assert ready("me/own")[0].options.drafter == "Qwen/Qwen3-0.6B"


def test_a_named_drafter_of_another_tokenizer_is_refused_before_weights_are_sent(
    hub: LocalHub, tmp_path: Path
) -> None:
    other = save(tmp_path / "other", 9_000, tokenizer=writing_tokenizer().to_str())
    with pytest.raises(CommandFailed, match=r"cannot draft for me/own: their tokenizers differ"):
        ready("me/own", str(other))
    assert not hub.sent["model.safetensors"]


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("gptq", "gptqmodel optimum"),
        ("awq", "gptqmodel"),
        ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed-tensors"),
    ],
)
def test_quantised_weights_that_nothing_here_reads_are_refused_before_they_are_sent(
    hub: LocalHub, tmp_path: Path, method: str, packages: str
) -> None:
    quantised = save(
        tmp_path / "q", 9_000, tokenizer="{}", quantization_config={"quant_method": method, "bits": 4}
    )
    hub.models["org/q"] = type(hub.models["me/own"])("org/q", quantised)
    with pytest.raises(InvalidRequest, match=f"quantised by {method}, .*: pip install {packages}; or give"):
        ready("org/q")
    assert not hub.sent["model.safetensors"]


def test_a_repository_without_weights_that_can_be_served_is_named(hub: LocalHub, tmp_path: Path) -> None:
    gguf = save(tmp_path / "gguf", 10, tokenizer="{}")
    (gguf / "model.safetensors").rename(gguf / "model-Q4_K_M.gguf")
    hub.models["org/gguf"] = type(hub.models["me/own"])("org/gguf", gguf)
    with pytest.raises(InvalidRequest, match=r"'org/gguf' has no weights that can be served .*GGUF"):
        ready("org/gguf")


def test_suggest_prints_the_choice_its_reason_and_how_to_measure_the_pair(
    hub: LocalHub, suggest: Run
) -> None:
    done = suggest("Qwen/Qwen3-8B")
    assert done.status == 0, done.err
    assert done.out.splitlines() == [
        "drafter  Qwen/Qwen3-0.6B: the smallest model of the family Qwen3",
        "family   Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B",
        "head     RedHatAI/Qwen3-8B-speculator.eagle3: made for this target; "
        "outrider up Qwen/Qwen3-8B --heads auto",
        "measure  outrider models check Qwen/Qwen3-8B Qwen/Qwen3-0.6B",
    ]
    assert not hub.sent["model.safetensors"]


def test_suggest_as_json_has_what_was_passed_over(hub: LocalHub, suggest: Run) -> None:
    hub.gated = frozenset({"Qwen/Qwen3-0.6B"})
    said = suggest("Qwen/Qwen3-8B", "--json").said
    assert said["drafter"] == "Qwen/Qwen3-1.7B"
    assert said["family"] == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    assert said["head"] == "RedHatAI/Qwen3-8B-speculator.eagle3"
    (passed_over,) = said["passed_over"]
    assert passed_over["model"] == "Qwen/Qwen3-0.6B"
    assert "is gated: accept its terms" in passed_over["why"]
    own = suggest("me/own", "--json").said
    assert (own["drafter"], own["head"]) == (None, None)


@pytest.mark.parametrize(
    ("target", "heads", "said"),
    [
        (
            "Qwen/Qwen3-8B",
            ("RedHatAI/Qwen3-8B-speculator.eagle3", "mine=me/head"),
            "the head is RedHatAI/Qwen3-8B-speculator.eagle3; --heads none does without",
        ),
        ("me/own", ("mine=me/head",), "no head drafts: none is known for me/own"),
    ],
)
def test_auto_takes_the_head_that_is_known_for_the_target_and_says_so(
    hub: LocalHub, target: str, heads: tuple[str, ...], said: str
) -> None:
    asked = StackOptions(target=target, drafter="none", heads=("auto", "mine=me/head"))
    told: list[str] = []
    assert ready_models(asked, Unseen(), told.append).options.heads == heads
    assert told == [said]


def test_auto_takes_the_embedded_head_for_the_embedded_target(cache: Path) -> None:
    found = ready_models(StackOptions(heads=("auto",)), Unseen(), lambda _: None).options
    assert found.heads == (str(EMBEDDED / "heads" / "eagle"),)


def test_a_file_in_place_of_a_folder_is_named_without_asking_a_hub(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(InvalidRequest, match=r"model\.safetensors' is a file: give the folder"):
        find_model(str(file))
