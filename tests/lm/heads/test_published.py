"""Published layouts load, are written as published, and a head that does not fit is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.lm.features import LAST
from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head, Eagle3Options
from outrider.lm.heads.hydra import HydraHeads, HydraSizes
from outrider.lm.heads.layer import LayerOptions
from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.mtp import PredictionModule
from outrider.lm.heads.published import head_class, load_head, write_head
from speculative.errors import InvalidRequest, ModelRefused, OutriderError
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import LAYER, TARGET, WIDTH, shaken

KINDS: dict[str, Callable[[], nn.Module]] = {
    "medusa": lambda: MedusaHeads(TARGET, 3),
    "medusa of two blocks": lambda: MedusaHeads(TARGET, 2, blocks=2),
    "blockwise": lambda: MedusaHeads(TARGET, 2, shared=True),
    "hydra": lambda: HydraHeads(TARGET, HydraSizes(3, blocks=2)),
    "hydra with a prefix layer": lambda: HydraHeads(TARGET, HydraSizes(2, prefix=True)),
    "hydra without places for dropout": lambda: HydraHeads(
        TARGET, HydraSizes(2, grounded=False, bias=False, spaced=False)
    ),
    "pass": lambda: LookAheadEmbeddings(TARGET, 3),
    "eagle": lambda: EagleHead(TARGET, LAYER),
    "eagle without bias": lambda: EagleHead(TARGET, LAYER, bias=False),
    "mtp": lambda: PredictionModule(TARGET, LAYER, LayerOptions(query_norm=True)),
    "eagle3": lambda: Eagle3Head(TARGET, LAYER, (1, 1, 0), VOCABULARY, False),
    "eagle3 of some ids": lambda: Eagle3Head(TARGET, LAYER, (0, 2), 20, True),
}


def written(folder: Path, head: nn.Module) -> nn.Module:
    shaken(head)
    write_head(head, folder, torch.float32)
    return head


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_was_written_loads_as_it_was(kind: str, tmp_path: Path) -> None:
    head = written(tmp_path, KINDS[kind]())
    config = HeadConfig.read(str(tmp_path))
    assert head_class(config) is type(head)
    loaded = load_head(config, TARGET)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, weight in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_weights_bear_the_published_names(tmp_path: Path) -> None:
    written(tmp_path / "medusa", MedusaHeads(TARGET, 2))
    assert sorted(load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")) == [
        f"{head}.{name}" for head in (0, 1) for name in ("0.linear.bias", "0.linear.weight", "1.weight")
    ]
    written(tmp_path / "eagle", EagleHead(TARGET, LAYER))
    assert set(load_file(tmp_path / "eagle" / "model.safetensors")) == {
        "fc.weight",
        "fc.bias",
        *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }


def test_the_first_layouts_of_the_papers_load(tmp_path: Path) -> None:
    """Pickled weights; EAGLE's repeat the target's embeddings."""
    heads = shaken(MedusaHeads(TARGET, 2))
    torch.save(
        {name.removeprefix("heads."): weight for name, weight in heads.state_dict().items()},
        tmp_path / "medusa_lm_head.pt",
    )
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    loaded = load_head(HeadConfig.read(str(tmp_path)), TARGET)
    hidden = torch.randn(3, WIDTH)
    assert torch.equal(loaded(hidden), heads(hidden))

    folder = tmp_path / "eagle"
    folder.mkdir()
    eagle = shaken(EagleHead(TARGET, LAYER, bias=False))
    weights = {name.replace("layer.", "layers.0."): value for name, value in eagle.state_dict().items()}
    torch.save(
        weights | {"embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH)}, folder / "pytorch_model.bin"
    )
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    raw = {name: getattr(LAYER, name) for name in fields}
    (folder / "config.json").write_text(
        json.dumps(
            raw
            | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": 1,
                "vocab_size": VOCABULARY,
                "rope_theta": 10000.0,
                "bias": False,
            }
        )
    )
    config = HeadConfig.read(str(folder))
    assert EagleHead.needs(config, TARGET.shape) == HeadNeeds((LAST,), ((2, 8), (2, 8)))
    found = load_head(config, TARGET)
    tokens, before = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, WIDTH)
    assert torch.allclose(found(tokens, before), eagle(tokens, before), atol=1e-5)


def in_speculators(kind: str, layer: dict[str, Any], **fields: Any) -> str:
    """A config.json as the library `speculators` writes it."""
    return json.dumps(
        {
            "architectures": ["Speculator"],
            "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "org/target"}},
            "speculators_model_type": kind,
            "speculators_version": "0.3.0",
            "transformer_layer_config": layer | {"model_type": "llama"},
        }
        | fields
    )


def layer_fields() -> dict[str, Any]:
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: getattr(LAYER, name) for name in own} | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}


def test_eagle3_loads_as_its_authors_publish_it(tmp_path: Path) -> None:
    """Pickled weights; ids that may be drafted as steps over the vocabulary; no layers named."""
    head = shaken(Eagle3Head(TARGET, LAYER, (1, 1, 0), 20, True))
    head.d2t = torch.arange(20)
    own = {"layer.": "midlayer.", "hidden_norm.": "midlayer.hidden_norm."}
    own["input_layernorm."] = "midlayer.input_layernorm."
    weights = {
        next((new + name.removeprefix(old) for old, new in own.items() if name.startswith(old)), name): value
        for name, value in head.state_dict().items()
    }
    assert {"d2t", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight"} < weights.keys()
    drafted = torch.zeros(VOCABULARY, dtype=torch.bool)
    drafted[torch.arange(20) * 2] = True
    torch.save(weights | {"t2d": drafted}, tmp_path / "pytorch_model.bin")
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(layer_fields() | fields))
    config = HeadConfig.read(str(tmp_path))
    assert Eagle3Head.needs(config, TARGET.shape).reads == (1, 1, 0), "before layers 2, 4 / 2 and 4 - 3"
    loaded = load_head(config, TARGET)
    hidden = torch.randn(1, 3, WIDTH)
    assert torch.equal(loaded.logits(hidden), head.logits(hidden))
    assert int(loaded.logits(hidden).isfinite().sum()) == 3 * 20


def test_eagle3_of_speculators_loads(tmp_path: Path) -> None:
    options = Eagle3Options(True, own_embeddings=True, norm_before_fusion=True, norm_before_residual=True)
    head = shaken(Eagle3Head(TARGET, LAYER, (0, 1, 2), VOCABULARY, False, options))
    own = {"layer.": "layers.0.", "hidden_norm.": "layers.0.hidden_norm."}
    own["input_layernorm."] = "layers.0.input_layernorm."
    weights = {
        next((new + name.removeprefix(old) for old, new in own.items() if name.startswith(old)), name): value
        for name, value in head.state_dict().items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_residual": True}
    text = in_speculators("eagle3", layer_fields(), draft_vocab_size=VOCABULARY, **layers)
    (tmp_path / "config.json").write_text(text)
    loaded = load_head(HeadConfig.read(str(tmp_path)), TARGET)
    assert loaded.reads == (0, 1, 2)
    tokens, features = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 3, WIDTH)
    assert torch.equal(loaded(tokens, loaded.fuse(features)), head(tokens, head.fuse(features)))


def test_eagle_of_speculators_loads(tmp_path: Path) -> None:
    head = shaken(EagleHead(TARGET, LAYER, normed=True, options=LayerOptions(input_norm=True)))
    own = {"fc.": "fusion_fc.", "layer.": "transformer."}
    weights = {
        next((new + name.removeprefix(old) for old, new in own.items() if name.startswith(old)), name): value
        for name, value in head.state_dict().items()
    }
    assert {"embedding_layernorm.weight", "fusion_fc.bias", "transformer.mlp.up_proj.weight"} < weights.keys()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        in_speculators("eagle", layer_fields(), layernorms=True, fusion_bias=True)
    )
    loaded = load_head(HeadConfig.read(str(tmp_path)), TARGET)
    tokens, hidden = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, WIDTH)
    assert torch.equal(loaded(tokens, hidden), head(tokens, hidden))
    assert torch.equal(loaded.logits(hidden), head.logits(hidden))


def test_mtp_of_speculators_loads_beside_the_sizes_of_its_whole_target(tmp_path: Path) -> None:
    head = shaken(PredictionModule(TARGET, LAYER, LayerOptions(query_norm=True)))
    write_head(head, tmp_path, torch.float32)
    names = set(load_file(tmp_path / "model.safetensors"))
    layer = {f"self_attn.{part}.weight" for part in ("q_norm", "k_norm", "q_proj", "o_proj")}
    around = {"input_proj.weight", "token_layernorm.weight", "final_layernorm.weight"}
    assert {f"mtp_layers.0.{name}" for name in layer | around} < names
    sizes = layer_fields() | {"num_hidden_layers": 36}
    (tmp_path / "config.json").write_text(in_speculators("mtp", sizes, num_nextn_predict_layers=1))
    loaded = load_head(HeadConfig.read(str(tmp_path)), TARGET)
    tokens, hidden = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, WIDTH)
    assert torch.equal(loaded(tokens, hidden), head(tokens, hidden))


def test_layers_within_eagle_config_are_outputs(tmp_path: Path) -> None:
    written(tmp_path, KINDS["eagle3"]())
    ids = "eagle_aux_hidden_state_layer_ids"
    change(tmp_path, **{ids: None, "eagle_config": {ids: [0, 1, 3]}})
    assert Eagle3Head.needs(HeadConfig.read(str(tmp_path)), TARGET.shape).reads == (0, 1, 3)


def spoil(change_of: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoiled(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        weights = load_file(path)
        change_of(weights)
        save_file(weights, path)

    return spoiled


def half(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def in_a_list(folder: Path) -> None:
    no_weights(folder)
    torch.save([torch.zeros(1)], folder / "medusa_lm_head.pt")


def recast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return spoil(lambda weights: weights.update({name: weights[name].to(dtype)}))


@pytest.mark.parametrize(
    ("kind", "harm", "why"),
    [
        ("medusa", in_a_list, "medusa_lm_head.pt holds a list"),
        (
            "medusa",
            recast("0.1.weight", torch.int8),
            "heads.0.1.weight is torch.int8; weights of heads may be",
        ),
        ("eagle", recast("fc.weight", torch.float8_e4m3fn), "fc.weight is torch.float8_e4m3fn"),
        ("eagle3 of some ids", recast("d2t", torch.complex64), "describes no head"),
        ("eagle", lambda folder: change(folder, hidden_act="x"), "describes no head: KeyError: 'x'"),
        ("eagle", lambda folder: change(folder, intermediate_size=-1), "describes no head"),
        ("eagle", lambda folder: change(folder, architectures=True), "describes no head"),
        ("eagle", lambda folder: change(folder, transformer_layer_config=None), "describes no head"),
        ("eagle", lambda folder: change(folder, rope_parameters={"rope_type": "nope"}), "describes no"),
        ("eagle3", lambda folder: change(folder, eagle_aux_hidden_state_layer_ids=True), "describes no head"),
        ("eagle", half, "cannot be read"),
        ("eagle", no_weights, "no weights"),
        ("eagle", spoil(lambda weights: weights["fc.bias"].fill_(float("nan"))), "fc.bias holds NaN"),
        ("eagle", spoil(lambda weights: weights.pop("fc.weight")), "lacks 1 of its weights: fc.weight"),
        (
            "eagle",
            spoil(lambda weights: weights.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)})),
            "weights that no eagle head has",
        ),
        ("eagle", lambda folder: change(folder, hidden_size=64), f"its width is 64, the target's {WIDTH}"),
        ("eagle", lambda folder: change(folder, vocab_size=9), "its vocabulary has 9 ids"),
        ("eagle", lambda folder: change(folder, num_hidden_layers=2), "it has 2 layers"),
        ("eagle", lambda folder: change(folder, num_attention_heads=-3), "describes no layer"),
        ("eagle", lambda folder: change(folder, architectures=[], num_hidden_layers=4), "not a head that"),
        ("eagle3", lambda folder: change(folder, target_hidden_size=64), "it is for targets of width 64"),
        (
            "eagle3",
            lambda folder: change(folder, eagle_aux_hidden_state_layer_ids=[1, 9, 2]),
            "before layers [1, 9, 2]; the target has 4 layers",
        ),
        ("eagle3", lambda folder: change(folder, draft_vocab_size=VOCABULARY + 1), "draft_vocab_size is"),
        ("eagle3", lambda folder: change(folder, draft_vocab_size=5), "lacks 1 of its weights: d2t"),
        (
            "eagle3 of some ids",
            spoil(lambda weights: weights["d2t"].fill_(VOCABULARY)),
            f"the target has ids 0 to {VOCABULARY - 1}",
        ),
        ("eagle3 of some ids", spoil(lambda weights: weights.pop("d2t")), "lacks 1 of its weights: d2t"),
        ("mtp", lambda folder: change(folder, num_nextn_predict_layers=2), "it may be 1 to 1"),
        ("pass", lambda folder: change(folder, hidden_size=64), f"its width is 64, the target's {WIDTH}"),
        ("pass", lambda folder: change(folder, look_ahead_tokens=4), "embeddings has the shape [3,"),
        ("pass", spoil(lambda weights: weights["embeddings"].fill_(float("nan"))), "holds NaN"),
        ("hydra", lambda folder: change(folder, hydra_head_arch="eagle-attn"), "'prefix-mlp' are served"),
        ("hydra", lambda folder: change(folder, hydra_head_arch="prefix-mlp"), "lacks 10 of its weights"),
        ("hydra", lambda folder: change(folder, hidden_state_offset=1), "only 0 is served"),
        ("hydra", half, "cannot be read"),
        ("medusa", half, "cannot be read"),
        ("medusa", lambda folder: change(folder, medusa_num_heads=0), "it may be 1 to 16"),
        ("medusa", lambda folder: change(folder, medusa_num_heads=4), "lacks 3 of its weights"),
        (
            "medusa",
            spoil(lambda weights: weights.update({"0.1.weight": torch.zeros(VOCABULARY, 9)})),
            "has the shape",
        ),
        ("medusa", lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        ("medusa", lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ],
)
def test_a_checkpoint_at_fault_is_refused_by_name(
    kind: str, harm: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    written(tmp_path, KINDS[kind]())
    harm(tmp_path)
    with pytest.raises((InvalidRequest, ModelRefused)) as caught:
        load_head(HeadConfig.read(str(tmp_path)), TARGET)
    assert why in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(OutriderError, match="no model folder '/nowhere'"):
        HeadConfig.read("/nowhere")
