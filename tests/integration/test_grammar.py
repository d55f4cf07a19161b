"""Structured output through separate processes, a real drafter among them, by client and command line."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider.cli.app import main
from outrider.client import Client, Completion
from speculative.errors import InvalidRequest
from speculative.noise import derive
from tests.conftest import save_tiny_llama, tiny_tokenizer
from tests.integration.live import Up, until
from tests.integration.services import Services

PROMPT = "for index, value in enumerate(values):\n    print(index, value)\nfor index"
# The tiny target's tokenizer has no quotes.
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 2,
    "maxItems": 8,
}
PATTERN = r"(de|f[0-9]{1,3}|value ){3,12}:"
CHOICE = ["value in values", "value", "index"]
SUM = """
start: term ("+" term){1,6} ":"
term: NUMBER | "(" term ("-" term)+ ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
WAYS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": NUMBERS},
    "regex": {"regex": PATTERN},
    "object": {"json_object": True},
    "choice": {"choice": CHOICE},
    "lark": {"lark": SUM},
}


def check(way: str, answer: Completion) -> None:
    if answer.finish_reason != "stop":
        return
    if way == "regex":
        assert re.fullmatch(PATTERN, answer.text)
    elif way == "choice":
        assert answer.text in CHOICE
    elif way == "lark":
        assert re.fullmatch(r"[1-9(][0-9()+-]*:", answer.text)
    else:
        jsonschema.validate(json.loads(answer.text), NUMBERS if way == "schema" else {"type": "object"})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_nothing_of_it(client: Client, way: str, temperature: float) -> None:
    ended = 0
    for seed in range(3):
        request: dict[str, Any] = {"max_tokens": 80, "seed": seed, "temperature": temperature, **WAYS[way]}
        plain = client.generate(PROMPT, **request, speculation=False)
        drafted = client.generate(PROMPT, **request)
        assert (drafted.ids, drafted.text) == (plain.ids, plain.text)
        assert drafted.finish_reason == plain.finish_reason
        check(way, plain)
        ended += plain.finish_reason == "stop"
    assert ended or way == "object" or not temperature


def test_each_choice_has_a_matcher_of_its_own(client: Client) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "regex": PATTERN}
    together = client.generate(PROMPT, **request, seed=17, n=4)
    alone = [client.generate(PROMPT, **request, seed=derive(17, choice)) for choice in range(4)]
    assert [choice.ids for choice in together.choices] == [one.ids for one in alone]
    assert len({choice.ids for choice in together.choices}) > 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json_schema": "{nope"}, "json_schema is no JSON"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be used: Invalid type: nonsense"),
        ({"json_schema": {"enum": []}}, "json_schema cannot be used: Unsatisfiable"),
        ({"json_schema": {"enum": ["x" * 3_000_000]}}, "json_schema has 30000"),
        ({"json_schema": {"const": "quoted"}}, "ids that the target's tokenizer has"),
        ({"json_schema": 5}, "json_schema is 5; it must be a JSON schema"),
        ({"regex": "(("}, "regex cannot be used: unclosed group"),
        ({"regex": ""}, "regex has 0 bytes"),
        ({"regex": "a?" * 1000 + "a" * 1000}, "too many expressions"),
        ({"regex": "a", "json_object": True}, "regex and json_object are given"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": 5}, "choice is 5; it must be a string, or a list of strings"),
        ({"lark": "begin: /a/"}, "lark has no rule `start`"),
        ({"choice": ["a"], "lark": "start: /a/"}, "choice and lark are given"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos cannot be together with regex"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(client: Client, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(PROMPT, max_tokens=8, **asked)
    assert says in str(caught.value)


def test_the_command_line_takes_a_schema_or_a_file(
    up: Up, client: Client, tmp_path: Path, capsys: Any
) -> None:
    def said(*flags: str, status: int = 0) -> Any:
        common = ("--prompt", PROMPT, "--seed", "3", "--max-tokens", "60", "--json")
        with pytest.raises(SystemExit) as end:
            main(["generate", "--address", up.address, *common, *flags])
        assert end.value.code == status
        return json.loads(capsys.readouterr().out)

    file = tmp_path / "schema.json"
    file.write_text(json.dumps(NUMBERS))
    expected = list(client.generate(PROMPT, seed=3, max_tokens=60, json_schema=NUMBERS).ids)
    for argument in (json.dumps(NUMBERS), str(file)):
        assert said("--json-schema", argument)["ids"] == expected
    expected = list(client.generate(PROMPT, seed=3, max_tokens=60, regex=PATTERN).ids)
    assert said("--regex", PATTERN)["ids"] == expected
    assert said("--json-object")["text"].startswith("{")
    file.write_text(SUM)
    expected = list(client.generate(PROMPT, seed=3, max_tokens=60, lark=SUM).ids)
    assert said("--lark", SUM)["ids"] == said("--lark", str(file))["ids"] == expected
    assert "nor a file" in said("--lark", "missing.lark", status=2)["error"]["message"]
    assert said(*(word for text in CHOICE for word in ("--choice", text)))["text"] in CHOICE
    assert "nor a file" in said("--json-schema", "missing.json", status=2)["error"]["message"]
    assert "no JSON" in said("--json-schema", "{", status=1)["error"]["message"]


@pytest.mark.slow
def test_a_target_that_ends_with_a_newline_leaves_no_newline_in_the_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    newline = tokenizer.token_to_id("\u010a")
    model = save_tiny_llama(tmp_path / "target", seed=0, tokenizer=tokenizer)
    config = model / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [1, newline]}))
    with closing(Services(model, model)) as services:
        front = services.orchestrator([services.verifier()])
        with Client(front.address) as client:
            until(lambda: client.models())
            asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "logit_bias": {1: -100.0}}
            for seed in range(4):
                answer = client.generate(PROMPT, **asked, seed=seed, regex="[0-9]{2}")
                assert (answer.ids[-1], answer.finish_reason) == (newline, "stop")
                assert re.fullmatch("[0-9]{2}", answer.text)
