"""A verifier over weights in bfloat16 or int8: drafts change no id, and its digest is another model's."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.proposers.metered_engine import MeteredEngine
from drafter_service.drafters.causal_lm import CausalLMDrafter
from drafter_service.settings import DrafterSettings
from outrider.compiling.toolchain import find_compiler, processor_flags
from outrider.lm.weight_only.packing import WeightDtype
from speculative.params import SamplingParams
from verifier_service.loading import digest_of_weights
from verifier_service.settings import VerifierSettings

NAMES: list[WeightDtype] = ["bfloat16", "int8"]
PROMPT = [5, 9, 2, 40, 5, 9, 2, 17, 5, 9]


def engine(model: Path, name: WeightDtype, cache: Path, nodes: int) -> MeteredEngine:
    settings = VerifierSettings(
        model=str(model),
        weight_dtype=name,
        passes="eager",
        threads=1,
        kv_mb=16,
        cache_dir=cache,
        budget="fixed",
        small_model=str(model) if nodes else "",
    )
    return MeteredEngine(settings, ("lookup", "small-model") if nodes else (), nodes)


@pytest.mark.skipif(
    "avx512f" not in processor_flags().split() or find_compiler() is None,
    reason="the kernel takes AVX-512 and g++",
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_ids_with_drafts_are_those_of_plain_decoding(
    name: WeightDtype, temperature: float, tiny_llama: Path, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    plain = engine(tiny_llama, name, tmp_path, 0).decode([PROMPT], 60, params, 3)
    drafted = engine(tiny_llama, name, tmp_path, 8).decode([PROMPT], 60, params, 3)
    assert drafted.ids == plain.ids
    assert drafted.counts.rounds < plain.counts.rounds


@pytest.mark.skipif(
    "avx512f" not in processor_flags().split() or find_compiler() is None,
    reason="the kernel takes AVX-512 and g++",
)
@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_keeps_its_weights_so_too(name: WeightDtype, tiny_llama: Path, tmp_path: Path) -> None:
    settings = DrafterSettings(model=str(tiny_llama), weight_dtype=name, passes="eager", cache_dir=tmp_path)
    drafter = CausalLMDrafter.load(settings)
    assert drafter.numerics == f"cpu float32 {name}-weights"
    drafter.shut_down()


def test_weights_in_another_format_have_another_digest(tiny_llama: Path) -> None:
    digests = [
        digest_of_weights(VerifierSettings(model=str(tiny_llama), weight_dtype=name))
        for name in ("auto", "bfloat16", "int8")
    ]
    assert len(set(digests)) == 3
    assert len({len(digest) for digest in digests}) == 1


def test_settings_that_do_not_go_together_are_named(tiny_llama: Path) -> None:
    with pytest.raises(ValidationError, match="weight_dtype = int8 beside ranks = 2"):
        VerifierSettings(model=str(tiny_llama), weight_dtype="int8", ranks=2)
    with pytest.raises(ValidationError, match="weight_dtype = int8 beside dtype = bfloat16"):
        VerifierSettings(model=str(tiny_llama), weight_dtype="int8", dtype="bfloat16")
    with pytest.raises(ValidationError, match="weight_dtype = int8 beside drafter = ngram"):
        DrafterSettings(model=str(tiny_llama), weight_dtype="int8", drafter="ngram")
