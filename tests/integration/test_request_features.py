"""What else a request may ask, through separate processes: the same with and without drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import main
from outrider.client import Client
from speculative.noise import derive
from tests.integration.live import Up

PROMPT = "for index, value in enumerate(values):\n    print(index, value)\nfor index"
EOS = 1
LIKELY = {"logit_bias": {EOS: 9.0}}
"""The tiny target's end-of-sequence id, likely at every position."""

WAYS: dict[str, dict[str, Any]] = {
    "ignore_eos": {**LIKELY, "ignore_eos": True},
    "min_tokens": {**LIKELY, "min_tokens": 30},
    "stop_ids": {"stop_ids": [7, 30, 44, 61, 80], "min_tokens": 12},
    "late stop strings": {"stop": ["e", "n", "in"], "min_tokens": 25},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_nothing_of_it(client: Client, way: str, temperature: float) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "seed": 6, "temperature": temperature, **WAYS[way]}
    plain = client.generate(PROMPT, **request, speculation=False)
    drafted = client.generate(PROMPT, **request)
    assert drafted.ids == plain.ids
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
    assert len(plain.ids) > request.get("min_tokens", 1) - 1
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert one.id == other.id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        likeliest = [logprob for _, logprob in other.top]
        assert [logprob for _, logprob in one.top] == pytest.approx(likeliest, abs=1e-4)


def test_min_tokens_are_generated_and_then_the_request_may_end(client: Client) -> None:
    early = client.generate(PROMPT, max_tokens=60, temperature=0, **LIKELY)
    late = client.generate(PROMPT, max_tokens=60, temperature=0, min_tokens=20, **LIKELY)
    ignoring = client.generate(PROMPT, max_tokens=60, temperature=0, ignore_eos=True, **LIKELY)
    assert (early.finish_reason, early.ids[-1]) == ("stop", EOS)
    assert len(early.ids) < 20 < len(late.ids) <= 60
    assert EOS not in late.ids[:20]
    assert (ignoring.finish_reason, len(ignoring.ids)) == ("length", 60)
    assert ignoring.ids[: len(early.ids)] == early.ids


def test_a_stop_id_ends_the_request_and_has_no_text(client: Client) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "seed": 2, "ignore_eos": True}
    whole = client.generate(PROMPT, **request)
    ids = whole.ids
    stop = next(id_ for at, id_ in enumerate(ids) if at > 10 and id_ > EOS and id_ not in ids[:at])
    cut = client.generate(PROMPT, **request, stop_ids=[stop])
    assert (cut.finish_reason, cut.ids) == ("stop", whole.ids[: whole.ids.index(stop) + 1])
    assert whole.text.startswith(cut.text)
    before = client.generate(PROMPT, **request | {"max_tokens": len(cut.ids) - 1})
    assert cut.text == before.text


def test_a_stop_string_before_min_tokens_is_text(client: Client) -> None:
    request: dict[str, Any] = {"temperature": 0.9, "max_tokens": 80, "seed": 5, "ignore_eos": True}
    whole = client.generate(PROMPT, **request)
    stop = whole.text[6:8]
    cut = client.generate(PROMPT, **request, stop=stop)
    late = client.generate(PROMPT, **request, stop=stop, min_tokens=len(cut.ids) + 1)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(late.ids) > len(cut.ids)
    assert whole.text.startswith(late.text)
    assert stop in late.text


def test_choices_are_requests_with_derived_seeds(client: Client) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "logprobs": True, "min_tokens": 5}
    for speculation in (True, False):
        together = client.generate(PROMPT, **request, seed=17, n=4, speculation=speculation)
        alone = [client.generate(PROMPT, **request, seed=derive(17, choice)) for choice in range(4)]
        assert [choice.ids for choice in together.choices] == [one.ids for one in alone]
        assert [choice.text for choice in together.choices] == [one.text for one in alone]
        assert [choice.finish_reason for choice in together.choices] == [one.finish_reason for one in alone]
        assert [choice.seed for choice in together.choices] == [one.seed for one in alone]
        assert len({choice.ids for choice in together.choices}) > 1
        assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
        assert together.usage.completion_tokens == sum(len(one.ids) for one in alone)


def test_logprobs_are_those_of_transformers(client: Client, tiny_llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    prompt = [5, 9, 30, 41]
    generated = client.generate(
        ids=prompt, max_tokens=60, temperature=0.8, top_k=20, logprobs=True, top_logprobs=20, ignore_eos=True
    )
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *generated.ids]])).logits[0]
    rows = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    assert [one.id for one in generated.logprobs] == list(generated.ids)
    for row, one in zip(rows, generated.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.id]), abs=1e-4)
        assert len(one.top) == 20
        for (id_, logprob), likeliest in zip(one.top, row.topk(20).values.tolist(), strict=True):
            assert logprob == pytest.approx(likeliest, abs=1e-4)
            assert logprob == pytest.approx(float(row[id_]), abs=1e-4)


def test_json_has_logprobs_and_choices_where_they_are_asked_for(up: Up, client: Client, capsys: Any) -> None:
    def said(*flags: str) -> Any:
        with pytest.raises(SystemExit) as end:
            main(["generate", "--address", up.address, "--prompt", PROMPT, "--seed", "3", *flags])
        assert end.value.code == 0
        return capsys.readouterr().out

    flags = ("--max-tokens", "20", "--min-tokens", "4", "--stop-ids", "7,30", "--ignore-eos", "--json")
    one = json.loads(said(*flags, "--logprobs", "--top-logprobs", "2", "--logprobs-of", "processed"))
    asked: dict[str, Any] = {"max_tokens": 20, "min_tokens": 4, "stop_ids": [7, 30], "seed": 3}
    asked["ignore_eos"] = True
    same = client.generate(PROMPT, **asked, logprobs=True, top_logprobs=2, logprobs_of="processed")
    assert list(one) == ["ids", "text", "finish_reason", "seed", "session", "usage", "logprobs"]
    assert [entry["id"] for entry in one["logprobs"]] == one["ids"] == list(same.ids)
    assert [[len(pair) for pair in entry["top"]] for entry in one["logprobs"]] == [[2, 2]] * len(same.ids)
    several = json.loads(said(*flags, "--n", "2"))
    assert several["choices"][0]["ids"] == several["ids"] == one["ids"]
    assert list(several["choices"][1]) == ["ids", "text", "finish_reason", "seed", "usage"]
    assert several["choices"][1]["seed"] == derive(3, 1)
    text = said("--max-tokens", "5", "--n", "2")
    assert text.index("--- 0: ") < text.index("--- 1: ")
