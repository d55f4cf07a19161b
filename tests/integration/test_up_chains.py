"""`outrider up` with targets that verify chains, and with targets that no verifier serves."""

import re
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.client import Client
from tests.conftest import TINY_VOCABULARY, tiny_tokenizer
from tests.integration.live import start_up
from tests.lm.families import greedy_ids, model_of

PROMPT = [5, 9, 30, 41, 5, 9, 30]


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()).save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_target_with_states_comes_up_beside_a_drafter_and_answers_with_the_ids_of_plain_decoding(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = model_of("mamba2", vocab_size=TINY_VOCABULARY)
    target = saved(model, tmp_path / "mamba2")
    up = start_up("--target", str(target), "--drafter", str(tiny_llama), log=tmp_path / "stderr")
    try:
        up.wait_ready()
        expected = greedy_ids(model, PROMPT, 40)
        with Client(up.address) as client:
            for speculation in (False, True):
                answer = client.generate(ids=PROMPT, max_tokens=40, temperature=0, speculation=speculation)
                assert list(answer.ids) == expected
        assert up.metric("verifier", "outrider_verifier_passes_info", passes="chains") == 1
    finally:
        assert up.stop() == 0
    assert "the target verifies chains of drafts, not trees" in up.log()


@pytest.mark.slow
def test_a_refused_target_ends_up_with_the_verifiers_reason(tmp_path: Path) -> None:
    target = saved(model_of("bert", vocab_size=TINY_VOCABULARY), tmp_path / "bert")
    up = start_up("--target", str(target), "--drafter", "none", log=tmp_path / "stderr")
    said = up.first_line()
    assert up.process.wait(100) == 1
    up.stop()
    assert said["error"]["code"] == "FAILED_PRECONDITION"
    both = (
        r"verifier: bert is not served: a packed tree pass differs .*; bert is not served: a pass of chains "
    )
    assert re.match(both, said["error"]["message"])
