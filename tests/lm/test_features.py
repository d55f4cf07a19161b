"""Hidden states that a pass keeps against those of the model's own eager forward."""

import random

import pytest
import torch

from outrider.lm.deterministic.profile import Deterministic
from outrider.lm.features import LAST
from outrider.lm.graphs import backend_choice
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.lm.families import VOCABULARY, model_of, twin_of
from tests.lm.test_runner import way

FAMILIES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "gpt2",
    "deepseek_v3",
]
LAYERS = (0, 1, LAST)


def eager_states(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Hidden states after the last of the ids, ``[layers, width]``, by transformers' own forward."""
    with torch.inference_mode():
        states = model(
            input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.stack([states[layer if layer == LAST else layer + 1][0, -1] for layer in LAYERS])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the tolerance of the check at load, in standard deviations of the row."""
    spread = expected.std(dim=-1, keepdim=True)
    assert float(((found - expected).abs() / spread).max()) < 1e-3


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_follow_prompts_trees_commits_and_shared_prefixes(family: str, static: bool) -> None:
    model = model_of(family)
    twin = twin_of(model)
    lm = PackedLM(model)
    if static:
        backend_choice.use_graphs(lm, "gathered")
    lm.wants = OutcomeWants(features=LAYERS)
    dice = random.Random(family)
    ids = [dice.randrange(VOCABULARY) for _ in range(2 * BLOCK + 3)]
    table, other = lm.table(), lm.table()
    outcome = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), ())])
    assert outcome.features is not None
    assert outcome.features.shape[:2] == (len(LAYERS), len(ids))
    for row in (0, BLOCK, len(ids) - 1):
        assert_same(outcome.features[:, row], eager_states(twin, ids[: row + 1]))
    table.commit(range(len(ids)))
    other.adopt(table.blocks[:2])
    rest = ids[2 * BLOCK :]
    for _ in range(3):
        drafted = [dice.randrange(VOCABULARY) for _ in range(6)]
        parents = [-1, -1, 0, 0, 1, 3]
        sequences = [SequenceRows(table, drafted, parents, [5])]
        if rest:
            sequences.append(SequenceRows(other, rest, range(-1, len(rest) - 1), ()))
        features = lm.forward(sequences).features
        assert features is not None
        for row in range(6):
            path = [drafted[at] for at in way(parents, row)]
            assert_same(features[:, row], eager_states(twin, ids + path))
        for row in range(len(rest)):
            assert_same(features[:, 6 + row], eager_states(twin, ids[: 2 * BLOCK + row + 1]))
        rest = []
        path = way(parents, dice.randrange(6))
        table.keep(path)
        ids = ids + [drafted[at] for at in path]
    for each in (table, other):
        lm.release(each)


def test_rows_that_fill_up_a_pass_have_no_hidden_states() -> None:
    lm = PackedLM(model_of("llama"), profile=Deterministic())
    lm.pack()
    assert lm.profile.padding(3) > 0
    lm.wants = OutcomeWants(features=(LAST,))
    outcome = lm.forward([SequenceRows(lm.table(), [1, 2, 3], [-1, 0, 1], ())])
    assert outcome.features is not None
    assert outcome.features.shape[1] == 3


def test_without_wants_nothing_is_kept() -> None:
    lm = PackedLM(model_of("llama"))
    assert lm.forward([SequenceRows(lm.table(), [1], [-1], [0])]).features is None
    lm.wants = OutcomeWants(features=(0,))
    lm.wants = OutcomeWants()
    assert lm.forward([SequenceRows(lm.table(), [1], [-1], [0])]).features is None


@pytest.mark.parametrize("layer", [-2, 4, 99])
def test_a_layer_that_the_model_lacks_is_refused(layer: int) -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=4))
    with pytest.raises(ModelRefused, match=f"layer {layer} cannot be kept: llama has layers 0 to 3"):
        lm.wants = OutcomeWants(features=(layer,))


def test_more_likeliest_tokens_than_a_digest_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="top is 0 to 32, not 33"):
        PackedLM(model_of("llama")).wants = OutcomeWants(top=33)
