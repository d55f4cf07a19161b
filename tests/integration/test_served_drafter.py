"""The drafter as a model of its own: `outrider up --serve-drafter`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.live import Up, start_up

PROMPTS = ([5, 9, 30, 41], [7] * 40)


@pytest.fixture(scope="module")
def serving(tiny_llama: Path, tiny_llama_b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("serving")
    flags = ("--target", str(tiny_llama), "--drafter", str(tiny_llama_b), "--serve-drafter")
    stack = start_up(*flags, log=folder / "stderr")
    try:
        stack.wait_ready()
        yield stack
    finally:
        assert stack.stop() == 0, stack.log()


@pytest.fixture
def client(serving: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.http}/v1", api_key="any", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI, model: str, prompt: list[int], *, drafts: bool, **more: Any) -> list[int]:
    """Token ids of an answer."""
    extra = {"return_token_ids": True, "speculation": {"enabled": drafts}}
    completion = client.completions.create(
        model=model, prompt=prompt, max_tokens=60, extra_body=extra, **more
    )
    (choice,) = completion.choices
    assert choice.model_extra is not None
    ids: list[int] = choice.model_extra["token_ids"]
    return ids


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """The ids of transformers' own greedy `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=0)
    ids: list[int] = whole[0, len(prompt) :].tolist()
    return ids


@pytest.mark.slow
def test_both_models_give_the_ids_of_their_own_generate(
    client: openai.OpenAI, tiny_llama: Path, tiny_llama_b: Path
) -> None:
    folders = {tiny_llama.name: tiny_llama, f"{tiny_llama.name}:drafter": tiny_llama_b}
    assert {model.id for model in client.models.list().data} == set(folders)
    for prompt in PROMPTS:
        own = {name: generated(folder, prompt) for name, folder in folders.items()}
        assert len({tuple(ids) for ids in own.values()}) == 2, "the weights differ, so the answers do"
        for name, ids in own.items():
            for drafts in (False, True):
                assert answer(client, name, prompt, drafts=drafts, temperature=0.0) == ids, (name, drafts)
        for name in folders:
            plain, drafted = (
                answer(client, name, prompt, drafts=drafts, temperature=1.0, seed=3)
                for drafts in (False, True)
            )
            assert plain == drafted, name


@pytest.mark.slow
def test_a_request_that_names_no_model_is_refused_with_both_names(
    client: openai.OpenAI, tiny_llama: Path
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{tiny_llama.name}, {tiny_llama.name}:drafter"):
        answer(client, "", PROMPTS[0], drafts=True)
