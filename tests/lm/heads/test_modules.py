"""The modules of heads compute what the published code does."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRotaryEmbedding

from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head, Eagle3Options
from outrider.lm.heads.hydra import HydraHeads, HydraSizes
from outrider.lm.heads.layer import HeadLayer, LayerOptions, attend
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.mtp import PredictionModule
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import LAYER, MODEL, TARGET, WIDTH, shaken


def eager(config: LlamaConfig) -> LlamaConfig:
    """The configuration of a layer whose attention is computed step by step."""
    found = LlamaConfig(**config.to_dict())
    found._attn_implementation = "eager"
    return found


def published_layer(layer: HeadLayer) -> LlamaDecoderLayer:
    """The library's decoder layer with the weights of ours, without a norm of its input."""
    found = LlamaDecoderLayer(eager(LAYER), 0)
    missing, unexpected = found.load_state_dict(layer.state_dict(), strict=False)
    assert missing == ["input_layernorm.weight"]
    assert not unexpected
    found.input_layernorm = nn.Identity()
    return found


@torch.no_grad()
def test_eagle_computes_a_decoder_layer_over_embedding_and_hidden_state() -> None:
    head = EagleHead(TARGET, LAYER)
    shaken(head)
    tokens = torch.tensor([[3, 7, 1, 9], [4, 4, 8, 2]])
    hidden = head.fuse(torch.randn(2, 4, 1, WIDTH, generator=torch.Generator().manual_seed(1)))
    fused = head.fc(torch.cat((MODEL.get_input_embeddings()(tokens), hidden), -1))
    positions = torch.arange(4)[None]
    mask = torch.full((4, 4), float("-inf")).triu(1)[None, None]
    expected = published_layer(head.layer)(
        fused,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=LlamaRotaryEmbedding(LAYER)(fused, positions),
    )
    found = head(tokens, hidden)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(head.logits(found), MODEL.lm_head(expected), atol=1e-3)


def test_all_weights_of_an_eagle_head_learn() -> None:
    head = EagleHead(TARGET, LAYER, options=LayerOptions(attention_bias=True, query_norm=True))
    tokens, hidden = torch.tensor([[3, 7, 1]]), torch.randn(1, 3, WIDTH)
    head.logits(head(tokens, hidden)).square().sum().backward()
    assert not [name for name, weight in head.named_parameters() if weight.grad is None]


@torch.no_grad()
def test_medusa_heads_begin_as_the_target_s_lm_head() -> None:
    heads = MedusaHeads(TARGET, 3)
    heads.start_from(MODEL.lm_head.weight)
    for head in heads.heads:
        head[0].linear.bias.zero_()
    hidden = torch.randn(5, WIDTH)
    assert torch.allclose(heads(hidden), MODEL.lm_head(hidden).expand(3, -1, -1), atol=1e-5)


@torch.no_grad()
def test_a_medusa_head_is_a_residual_block_and_an_output_layer() -> None:
    heads = MedusaHeads(TARGET, 2, blocks=2)
    shaken(heads)
    hidden = torch.randn(5, WIDTH)
    one, two, out = heads.heads[1]
    between = hidden + nn.functional.silu(hidden @ one.linear.weight.T + one.linear.bias)
    after = between + nn.functional.silu(between @ two.linear.weight.T + two.linear.bias)
    assert torch.allclose(heads(hidden)[1], after @ out.weight.T, atol=1e-4)


@torch.no_grad()
def test_heads_that_share_the_lm_head_give_the_target_s_logits() -> None:
    heads = MedusaHeads(TARGET, 2, shared=True)
    shaken(heads)
    hidden = torch.randn(5, WIDTH)
    block = heads.heads[0][0]
    after = hidden + nn.functional.silu(block.linear(hidden))
    assert torch.allclose(heads.logits(0, hidden), MODEL.lm_head(after), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("normed", [False, True], ids=["as published", "norm before the residual"])
def test_eagle3_attends_over_embedding_and_fused_hidden_states_side_by_side(normed: bool) -> None:
    head = Eagle3Head(TARGET, LAYER, (0, 1, 2), 20, True, Eagle3Options(norm_before_residual=normed))
    shaken(head)
    head.get_buffer("d2t").copy_(torch.arange(20) * 2)
    tokens = torch.tensor([[3, 7, 1, 9]])
    features = torch.randn(1, 4, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    library = LlamaDecoderLayer(eager(LAYER), 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(library.self_attn, name, getattr(head.layer.self_attn, name))
    library.self_attn.o_proj = head.layer.self_attn.o_proj
    hidden = features.flatten(-2) @ head.fc.weight.T
    state = head.hidden_norm(hidden)
    rows = torch.cat((head.input_layernorm(MODEL.get_input_embeddings()(tokens)), state), -1)
    mask = torch.full((4, 4), float("-inf")).triu(1)[None, None]
    rotation = LlamaRotaryEmbedding(LAYER)(rows, torch.arange(4)[None])
    attended, _ = library.self_attn(rows, position_embeddings=rotation, attention_mask=mask)
    between = (state if normed else hidden) + attended
    expected = between + head.layer.mlp(head.layer.post_attention_layernorm(between))
    found = head(tokens, head.fuse(features))
    assert torch.allclose(found, expected, atol=1e-4)
    logits = head.logits(found)
    drafted = torch.arange(20) * 3
    assert torch.allclose(logits[..., drafted], head.norm(expected) @ head.lm_head.weight.T, atol=1e-3)
    others = sorted(set(range(VOCABULARY)) - set(drafted.tolist()))
    assert bool((logits[..., others] == float("-inf")).all())


@torch.no_grad()
def test_a_hydra_head_reads_the_hidden_state_and_the_tokens_so_far() -> None:
    heads = shaken(HydraHeads(TARGET, HydraSizes(3, blocks=2)))
    hidden, path = torch.randn(4, WIDTH), torch.tensor([[3, 7], [3, 1], [9, 9], [0, 5]])
    _, first, _, second = heads.hydra_mlp[1]
    embedded = MODEL.get_input_embeddings()(path)
    rows = torch.cat((hidden, embedded[:, 0], embedded[:, 1]), -1)
    between = first.res_connection(rows) + nn.functional.silu(first.linear(rows))
    after = between + nn.functional.silu(second.linear(between))
    assert torch.allclose(heads.logits(1, hidden, path), heads.hydra_lm_head[1][1](after), atol=1e-4)


@torch.no_grad()
def test_an_mtp_module_is_a_whole_decoder_layer_over_projected_norms() -> None:
    head = shaken(PredictionModule(TARGET, LAYER, LayerOptions()))
    tokens = torch.tensor([[3, 7, 1, 9]])
    hidden = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    library = LlamaDecoderLayer(eager(LAYER), 0)
    library.load_state_dict(head.layer.state_dict())
    embedded = head.token_layernorm(MODEL.get_input_embeddings()(tokens))
    rows = torch.cat((embedded, head.hidden_layernorm(hidden)), -1) @ head.input_proj.weight.T
    positions = torch.arange(4)[None]
    given = library(
        rows,
        attention_mask=torch.full((4, 4), float("-inf")).triu(1)[None, None],
        position_ids=positions,
        position_embeddings=LlamaRotaryEmbedding(LAYER)(rows, positions),
    )
    found = head(tokens, hidden)
    assert torch.allclose(found, head.final_layernorm(given), atol=1e-4)
    assert torch.allclose(head.logits(found), MODEL.lm_head(head.final_layernorm(given)), atol=1e-3)


@torch.no_grad()
def test_hydras_prefix_layer_is_a_model_of_one_layer_over_hidden_states() -> None:
    heads = shaken(HydraHeads(TARGET, HydraSizes(1, prefix=True)))
    prefix = heads.prefix_embeding_layer
    assert prefix is not None
    assert TARGET.shape.layer is not None
    published = LlamaModel(eager(TARGET.shape.layer))
    missing, unexpected = published.load_state_dict(prefix.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight"]
    assert not unexpected
    hidden, positions = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    keys, values = prefix.keys_values(hidden, positions)
    attended = attend(prefix.queries(hidden, positions)[None], keys[None], values[None], causal=True)[0]
    expected = published(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
    assert torch.allclose(prefix.finish(hidden, attended), expected, atol=1e-4)
