"""Models with weights in bfloat16 or int8: their ids, their name, and what is refused."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.compiling.toolchain import find_compiler, processor_flags
from outrider.lm.kv.pool import COMPILED
from outrider.lm.linear import PackedLinear
from outrider.lm.runner import PackedLM
from outrider.lm.weight_only import kernel
from outrider.lm.weight_only.packing import PackedWeight, WeightDtype
from outrider.lm.weight_only.product import WeightOnlyProduct, round_linears
from speculative.errors import InvalidRequest
from tests.lm.families import VOCABULARY, greedy_ids, model_of
from tests.lm.test_families import NEW, decode_with_trees

pytestmark = pytest.mark.skipif(
    "avx512f" not in processor_flags().split() or find_compiler() is None,
    reason="the kernel takes AVX-512 and g++",
)

NAMES: list[WeightDtype] = ["bfloat16", "int8"]
PROMPTS = [[(7 * at + 3 * seed) % VOCABULARY for at in range(5 + 9 * seed)] for seed in range(3)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def saved(family: str, folder: Path) -> torch.nn.Module:
    model = model_of(family)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "deepseek_v3"])
def test_ids_through_trees_are_those_that_generate_gives_with_the_rounded_weights(
    family: str, name: WeightDtype, tmp_path: Path, cache: Path
) -> None:
    model = saved(family, tmp_path)
    plain = deepcopy(model)
    round_linears(plain, name)
    truths = [greedy_ids(plain, prompt, NEW) for prompt in PROMPTS]  # type: ignore[arg-type]

    lm = PackedLM.load(tmp_path, weight_dtype=name, cache_dir=cache)

    assert decode_with_trees(lm, PROMPTS, truths) == truths
    layers = [layer for layer in lm.model.modules() if isinstance(layer, PackedLinear)]
    assert layers
    assert all(isinstance(layer.product, WeightOnlyProduct) for layer in layers)


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_that_of_the_rounded_weights_and_a_row_s_bits_are_its_own(
    name: WeightDtype, cache: Path
) -> None:
    product = kernel.load_kernel("weight_dtype", cache)
    weight, bias, rows = torch.randn(61, 40), torch.randn(61), torch.randn(2, 11, 40)
    packed = PackedWeight.of(weight, name, product.width)
    found = product.multiply(rows, packed, bias)
    torch.testing.assert_close(found, nn.functional.linear(rows, packed.dense(), bias))
    assert torch.equal(product.multiply(rows[1, 7], packed, bias), found[1, 7])
    assert product.multiply(rows[:, :0], packed, bias).shape == (2, 0, 61)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_the_library_would_read_wrongly_are_refused(name: WeightDtype, cache: Path) -> None:
    product = kernel.load_kernel("weight_dtype", cache)
    packed = PackedWeight.of(torch.randn(61, 40), name, product.width)
    for rows in (torch.randn(5, 40).half(), torch.randn(5, 40).double(), torch.randn(5, 41)):
        with pytest.raises(ValueError, match=r"give float32 \[..., 40\]"):
            product.multiply(rows, packed, None)


def test_int8_decodes_another_model_than_floats(tmp_path: Path) -> None:
    """Else the tests above could pass with weights that were never rounded."""
    model = saved("llama", tmp_path)
    plain = deepcopy(model)
    round_linears(plain, "int8")
    weights = zip(model.parameters(), plain.parameters(), strict=True)
    assert any(not torch.equal(own, other) for own, other in weights)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_a_class_of_their_own(name: WeightDtype, tiny_llama: Path, cache: Path) -> None:
    lm = PackedLM.load(tiny_llama, weight_dtype=name, cache_dir=cache)
    assert lm.numerics == f"cpu float32 {name}-weights"
    assert lm.pool.numerics == f"eager {name}-weights"
    lm.pool.begin_class(COMPILED)
    assert lm.pool.numerics == f"compiled {name}-weights 1"


def test_a_tied_output_layer_is_rounded_and_the_embeddings_are_not() -> None:
    model = model_of("llama")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    before = model.model.embed_tokens.weight.clone()
    round_linears(model, "int8")
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert not torch.equal(model.lm_head.weight, before)


def test_a_packed_model_keeps_no_floats_of_its_linear_layers(tmp_path: Path, cache: Path) -> None:
    saved("llama", tmp_path)
    lm = PackedLM.load(tmp_path, weight_dtype="int8", cache_dir=cache)
    floats = {name for name, one in lm.model.named_parameters() if one.ndim == 2}
    assert floats == {"model.embed_tokens.weight"}


@pytest.fixture
def without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "processor_flags", lambda: "avx2 fma")


@pytest.mark.usefixtures("without_the_instructions")
def test_a_processor_without_the_instructions_is_named(tiny_llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="weight_dtype = int8: this processor lacks avx512f"):
        PackedLM.load(tiny_llama, weight_dtype="int8")


def test_a_machine_without_a_compiler_is_named(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel._load_once.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"weight_dtype = bfloat16: .* there is no C\+\+ compiler"):
        PackedLM.load(tiny_llama, weight_dtype="bfloat16")


def test_a_compiler_that_fails_is_named(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel._load_once.cache_clear()
    (tmp_path / "g++").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"weight_dtype = int8: the kernel .* cannot be compiled"):
        PackedLM.load(tiny_llama, weight_dtype="int8")


def test_what_does_not_go_together_is_named(tiny_llama: Path, cache: Path) -> None:
    with pytest.raises(InvalidRequest, match="weight_dtype = int8 beside deterministic"):
        PackedLM.load(tiny_llama, weight_dtype="int8", deterministic=True)
    with pytest.raises(InvalidRequest, match="weight_dtype = int8 beside dtype = bfloat16"):
        PackedLM.load(tiny_llama, weight_dtype="int8", dtype="bfloat16", cache_dir=cache)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_a_family_whose_weights_are_not_in_linear_layers_is_named(
    family: str, tmp_path: Path, cache: Path
) -> None:
    saved(family, tmp_path)
    with pytest.raises(InvalidRequest, match=f"weight_dtype = int8: linear layers hold .* of {family}"):
        PackedLM.load(tmp_path, weight_dtype="int8", cache_dir=cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_passes_give_the_same_ids_over_the_same_panels(
    name: WeightDtype, tmp_path: Path, cache: Path
) -> None:
    model = saved("llama", tmp_path)
    round_linears(model, name)
    truths = [greedy_ids(model, prompt, NEW) for prompt in PROMPTS]  # type: ignore[arg-type]
    lm = PackedLM.load(tmp_path, weight_dtype=name, cache_dir=cache)
    lm.compile_passes("compiled", cache)
    assert lm.numerics == f"cpu float32 compiled {name}-weights"
    assert decode_with_trees(lm, PROMPTS, truths) == truths
    lm.close()


@pytest.mark.slow
def test_without_a_cache_folder_a_process_compiles_the_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    real = kernel._load
    monkeypatch.setattr(kernel, "_load", lambda folder: (loaded.append(folder), real(folder))[1])
    kernel._load_once.cache_clear()
    assert kernel.load_kernel("weight_dtype", None) is kernel.load_kernel("weight_dtype", None)
    (folder,) = loaded
    assert not folder.exists()
