"""A part of the target as a drafter."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from drafter_service.drafters import load
from drafter_service.drafters.causal_lm import CausalLMDrafter
from drafter_service.settings import DrafterSettings
from outrider.runtime.settings import read_settings
from speculative.errors import InvalidRequest


@pytest.mark.parametrize("part", [{"skip": "1"}, {"skip": [1]}, {"exit_layer": 1}])
def test_a_drafter_keeps_the_layers_that_its_settings_leave(tiny_llama_bare: Path, part: dict) -> None:
    drafter = load(DrafterSettings(model=str(tiny_llama_bare), threads=1, **part))
    assert isinstance(drafter, CausalLMDrafter)
    assert len(drafter.lm.model.base_model.layers) == 1
    assert drafter.lm.pool.layout.layers == 1


@pytest.mark.parametrize("skip", ["0.mlp,1.attention", ["0.mlp", "1.attention"]])
def test_a_drafter_keeps_the_sublayers_that_its_settings_leave(tiny_llama_bare: Path, skip: object) -> None:
    drafter = load(DrafterSettings(model=str(tiny_llama_bare), threads=1, skip=skip))
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.lm.pool.layout.layers == 1, "keys and values of the one attention that is left"


@pytest.mark.parametrize(
    ("written", "read"), [("3", ("3",)), ("[3, 5]", ("3", "5")), ('[3, "5.mlp"]', ("3", "5.mlp"))]
)
def test_a_file_writes_a_skip_set_with_numbers_and_names(
    tmp_path: Path, written: str, read: tuple[str, ...]
) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(f'[drafter]\nmodel = "any"\nskip = {written}\n')
    assert read_settings(DrafterSettings, ["--config", str(file)], {}).skip == read


def test_a_skip_set_that_names_no_sublayer_is_refused_with_the_settings() -> None:
    with pytest.raises(ValidationError, match=r"'1\.norm' names nothing to skip: write 3 for layer 3"):
        DrafterSettings(model="any", skip="0,1.norm")


def test_a_skip_set_that_names_a_layer_that_is_not_there_is_refused(tiny_llama_bare: Path) -> None:
    with pytest.raises(InvalidRequest, match="layer 7 cannot be skipped: the model has layers 0 to 1"):
        load(DrafterSettings(model=str(tiny_llama_bare), threads=1, skip=(0, 7)))
