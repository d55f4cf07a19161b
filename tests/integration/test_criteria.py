"""A request that names a criterion, through separate processes, over gRPC and HTTP."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from outrider.cli.app import main
from outrider.client import Client
from speculative.acceptance.criterion import Promise
from speculative.errors import InvalidRequest
from speculative.window_shape import SHAPES
from tests.integration.live import Up

PROMPT = "for index, value in enumerate(values):\n    print(index, value)\nfor index"


@pytest.mark.parametrize(
    ("criterion", "temperature"),
    [
        ({"typical": {"epsilon": 0.01}}, 0.8),
        ({"specdec": {"beta": 8, "gap": 5}}, 0.0),
        ({"blockwise": {"top_k": 4}}, 0.0),
        ({"bild": {"rollback": 6, "fallback": 0.01}}, 0.0),
    ],
    ids=str,
)
def test_usage_says_what_was_promised(client: Client, criterion: Any, temperature: float) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "seed": 6, "temperature": temperature}
    relaxed = client.generate(PROMPT, **request, criterion=criterion)
    assert relaxed.usage.promise is Promise.RELAXED
    assert not relaxed.usage.replay_identical
    assert relaxed.usage.completion_tokens == len(relaxed.ids) <= 40
    assert client.generate(PROMPT, **request).usage.promise is Promise.SAME_IDS


@pytest.mark.parametrize("name", SHAPES)
def test_criteria_that_need_q_are_served(client: Client, name: str) -> None:
    request: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "criterion": {name: {}}}
    sampled = client.generate(PROMPT, **request, seed=6, temperature=0.8, n=2)
    promised = Promise.RELAXED if name == "lenience" else Promise.SAME_LAW
    assert sampled.usage.promise is promised
    assert not sampled.usage.replay_identical
    assert [len(choice.ids) for choice in sampled.choices] == [24, 24]
    greedy = client.generate(PROMPT, **request, temperature=0)
    plain = client.generate(PROMPT, max_tokens=24, ignore_eos=True, temperature=0, speculation=False)
    assert greedy.ids == plain.ids, "a point has one law"


def test_a_criterion_at_its_strict_end_gives_plain_decodings_ids(client: Client) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    plain = client.generate(PROMPT, **request, speculation=False)
    for criterion in ({"specdec": {"beta": 1}}, {"blockwise": {}}, {"bild": {"dissent": 0}}):
        assert client.generate(PROMPT, **request, criterion=criterion).ids == plain.ids


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"criterion": {"typical": {"epsilon": 3}}}, "criterion.typical.epsilon is 3; above 0 to 1"),
        ({"criterion": {"typical": {}}, "temperature": 0}, "criterion.typical needs a temperature"),
        ({"criterion": {"specdec": {}}, "speculation": False}, "the request takes none"),
        ({"criterion": {"specdec": {}}, "json_object": True}, "beside a grammar"),
        ({"criterion": {"nearly": {}}}, "criterion names 'nearly'"),
        ({"criterion": {"lenience": {"factor": 0}}}, "criterion.lenience.factor is 0; above 0 to 1"),
        ({"criterion": {"ratio": {}}, "sources": ["lookup"]}, "criterion.ratio accepts drafts that"),
    ],
    ids=str,
)
def test_what_cannot_hold_is_refused(client: Client, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        client.generate(PROMPT, max_tokens=5, **asked)


def test_the_command_line_takes_a_criterion(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--address", up.address, "--prompt", PROMPT, "--max-tokens", "20", "--json"]
    with pytest.raises(SystemExit) as end:
        main([*asked, "--criterion", "specdec:beta=8,gap=5"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["usage"]["promise"] == "relaxed"


def test_http_takes_a_criterion_and_says_what_was_promised(up: Up) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 20, **more}).encode()
        url = f"{up.http}/v1/completions"
        sent = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(sent, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    assert ask(speculation={"criterion": {"typical": {"delta": 0.5}}})["usage"]["promise"] == "relaxed"
    assert "promise" not in ask()["usage"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(speculation={"criterion": {"specdec": {"beta": 0}}})
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "speculation.criterion")
    assert "criterion.specdec.beta is 0" in error["message"]
