"""Compiled passes of families whose layers are built otherwise than those of test_compiled_passes.py."""

from pathlib import Path
from typing import Any

import pytest

from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from tests.lm.families import VOCABULARY, WINDOW, greedy_ids, logits_of, model_of, twin_of
from tests.lm.test_families import NEW, decode_with_trees

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    # A layer with a window and one without, scores with soft caps, norms before and after.
    "gemma2": {"num_hidden_layers": 2},
    # Latent attention, keys wider than values. Its experts' layers are compiled in no model.
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("family", KINDS)
def test_ids_are_those_of_generate_and_logits_those_of_eager_passes(family: str, tmp_path: Path) -> None:
    model = model_of(family, **KINDS[family])
    model.save_pretrained(tmp_path / "model")
    compiled, eager = (PackedLM.load(tmp_path / "model") for _ in range(2))
    compiled.compile_passes("compiled", tmp_path / "cache")
    text = [(7 * at + 3) % VOCABULARY for at in range(2 * WINDOW + 3)]
    prompts = [text, [5, 11, 23, 42, 2]]
    truths = [greedy_ids(twin_of(model), prompt, NEW) for prompt in prompts]
    assert any(len(set(truth)) > 3 for truth in truths), "a test on a constant would show nothing"

    assert decode_with_trees(compiled, prompts, truths) == truths

    at_once = [
        logits_of(lm, [SequenceRows(lm.table(), text, range(-1, len(text) - 1), range(len(text)))])
        for lm in (compiled, eager)
    ]
    assert compiled.compiled is not None
    assert (at_once[0] - at_once[1]).abs().max() < 1e-4 * at_once[1].std()
    compiled.close()


def test_a_mixture_of_experts_is_refused_by_the_operator_that_is_not_compiled(tmp_path: Path) -> None:
    model_of("gpt_oss", num_hidden_layers=1, layer_types=None).save_pretrained(tmp_path)
    lm = PackedLM.load(tmp_path)
    with pytest.raises(InvalidRequest, match=r"its passes call transformers\.grouped_mm_fallback"):
        lm.compile_passes("compiled", tmp_path / "cache")
    lm.close()
