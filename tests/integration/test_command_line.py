"""The command line and the clients against running services."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import AsyncClient
from outrider.cli.app import main
from outrider.client import Client
from tests.in_time import in_time
from tests.integration.live import ROOT, Up

OUTRIDER = (sys.executable, "-W", "error", "-m", "outrider.cli")
PROMPT = "import os\nfrom pathlib"


def generate(capsys: Any, *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["generate", *flags])
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def test_json_is_one_object_with_exactly_these_fields(up: Up, client: Client, capsys: Any) -> None:
    flags = [
        "--prompt",
        PROMPT,
        "--max-tokens",
        "30",
        "--temperature",
        "0.7",
        "--top-k",
        "40",
        "--top-p",
        "0.95",
    ]
    flags += ["--min-p", "0.01", "--repetition-penalty", "1.1", "--presence-penalty", "0.1"]
    flags += ["--frequency-penalty", "0.1", "--stop", "@@", "--seed", "7", "--speculation", "on"]
    flags += ["--sources", "lookup,drafter", "--nodes", "8", "--session", "named"]
    status, out, err = generate(capsys, "--address", up.address, "--json", *flags)
    assert (status, out.count("\n"), err) == (0, 1, "")
    said = json.loads(out)
    assert list(said) == ["ids", "text", "finish_reason", "seed", "session", "usage"]
    assert list(said["usage"]) == [
        "prompt_tokens",
        "completion_tokens",
        "rounds",
        "acceptance_length",
        "accepted_by_source",
        "promise",
    ]
    same = client.generate(
        PROMPT, max_tokens=30, temperature=0.7, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.1, stop=["@@"], seed=7, speculation=False,
    )  # fmt: skip
    assert tuple(said["ids"]) == same.ids
    assert (said["text"], said["seed"], said["session"]) == (same.text, 7, "named")
    assert said["usage"]["prompt_tokens"] == same.usage.prompt_tokens


def test_files_and_the_prompt_itself_are_drafted_from_and_change_no_token(
    up: Up, client: Client, tmp_path: Path, capsys: Any
) -> None:
    asked = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    plain = client.generate(PROMPT, speculation=False, **asked)  # type: ignore[arg-type]
    answer = tmp_path / "answer.py"
    answer.write_text(PROMPT + plain.text, encoding="utf-8")
    flags = ["--prompt", PROMPT, "--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--json"]
    flags += ["--sources", "references", "--nodes", "16", "--references", str(answer), "--edit"]

    status, out, _ = generate(capsys, "--address", up.address, *flags)

    said = json.loads(out)
    assert (status, tuple(said["ids"])) == (0, plain.ids)
    in_time(said["usage"]["accepted_by_source"].get("references", 0) > 20, said["usage"])


def test_ids_are_taken_as_they_are(up: Up, client: Client, capsys: Any) -> None:
    flags = ("--ids", "5,9,30", "--max-tokens", "10", "--seed", "7", "--speculation", "off", "--json")
    status, out, _ = generate(capsys, "--address", up.address, *flags)
    assert status == 0
    assert tuple(json.loads(out)["ids"]) == client.generate(ids=[5, 9, 30], max_tokens=10, seed=7).ids
    assert json.loads(out)["usage"]["acceptance_length"] == 1.0


def test_without_json_the_text_is_the_data(up: Up, client: Client, capsys: Any) -> None:
    flags = ("--prompt", PROMPT, "--max-tokens", "20", "--seed", "3")
    status, out, err = generate(capsys, "--address", up.address, *flags)
    assert (status, out) == (0, client.generate(PROMPT, max_tokens=20, seed=3).text + "\n")
    assert "acceptance length" in err


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--ids", "5", "--temperature", "nan"), "INVALID_ARGUMENT", "temperature is nan"),
        (("--ids", "5", "--temperature", "-1"), "INVALID_ARGUMENT", "temperature is -1"),
        (("--ids", ""), "INVALID_ARGUMENT", "empty"),
        (("--prompt", ""), "INVALID_ARGUMENT", "empty"),
        (("--ids", "5", "--max-tokens", "-4"), "INVALID_ARGUMENT", "max_tokens is -4"),
        (("--ids", "5", "--model", "gpt-7"), "NOT_FOUND", "gpt-7"),
        (("--ids", "5", "--timeout", "0.000001"), "DEADLINE_EXCEEDED", ""),
    ],
)
def test_a_refused_request_is_one_line_on_standard_output(
    up: Up, capsys: Any, flags: tuple[str, ...], code: str, says: str
) -> None:
    status, out, _ = generate(capsys, "--address", up.address, "--json", *flags)
    assert (status, out.count("\n")) == (1, 1)
    error = json.loads(out)["error"]
    assert error["code"] == code
    assert says in error["message"]
    status, out, err = generate(capsys, "--address", up.address, *flags)
    assert (status, out) == (1, "")
    assert says in err


def test_the_command_works_as_a_program(up: Up) -> None:
    done = subprocess.run(
        [
            *OUTRIDER,
            "generate",
            "--address",
            up.address,
            "--prompt",
            "Ünïcode",
            "--max-tokens",
            "5",
            "--json",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(json.loads(done.stdout)["ids"]) <= 5


def test_up_says_who_runs_where(up: Up) -> None:
    roles = [process["role"] for process in up.processes]
    assert roles == ["verifier", "drafter", "retrieval", "orchestrator"]
    assert up.address == up.processes[-1]["address"]
    running = up.children()
    assert {process["pid"] for process in up.processes} - {running["drafter"]} <= {
        *running.values(),
        up.processes[1]["pid"],
    }


async def test_the_asyncio_client_says_the_same(up: Up, client: Client) -> None:
    async with AsyncClient(up.address) as other:
        assert await other.models() == client.models()
        stream = other.stream(PROMPT, max_tokens=40, seed=9)
        chunks = [chunk async for chunk in stream]
        completion = await stream.completion()
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert completion.ids == client.generate(PROMPT, max_tokens=40, seed=9).ids
        assert not await other.cancel("nobody")


def test_the_model_describes_itself(client: Client) -> None:
    (model,) = client.models()
    assert (model.max_length, model.vocabulary_size, model.has_tokenizer) == (256, 96, True)
    assert set(model.sources) == {"lookup", "drafter", "corpus", "past", "dense"}
