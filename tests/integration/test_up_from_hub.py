"""`outrider up ID` against a hub on this machine: download, drafter, announcement, exact ids, chat."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.shared.local_hub import LocalHub
from outrider.client import Client
from tests.conftest import save_tiny_llama, writing_tokenizer
from tests.integration.live import ROOT, Up, until

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
REQUEST: dict[str, Any] = {"ids": [5, 9, 30, 41], "max_tokens": 40, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    root, tokenizer = tmp_path_factory.mktemp("hub"), writing_tokenizer()
    models = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    for name in models:  # the same weights, so that drafts are right
        save_tiny_llama(root / name, seed=0, tokenizer=tokenizer, width=320)
        (root / name / "chat_template.jinja").write_text(TEMPLATE)
    with LocalHub({name: root / name for name in models}) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def environment(hub: LocalHub, home: Path) -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
    return {
        **left,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
        # Passes of this target take a millisecond, so that drafts from another process do not pay.
        "OUTRIDER_VERIFIER__BUDGET": "fixed",
    }


def start(hub: LocalHub, home: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-u", "-m", "outrider.cli", "up", *flags]
    with (home / "stderr").open("wb") as errors:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment(hub, home), process_group=0
        )


@pytest.fixture(scope="module")
def said(hub: LocalHub, home: Path) -> Iterator[list[str]]:
    """What a running `up Qwen/Qwen3-8B` printed; the first connection for weights had broken."""
    hub.wrong.cut_after = {"model.safetensors": [30_000]}
    flags = ("Qwen/Qwen3-8B", "--threads", "1", "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0")
    up = Up(start(hub, home, *flags), home / "stderr")
    assert up.process.stdout is not None
    lines = []
    try:
        for line in up.process.stdout:
            lines.append(line.decode().rstrip())
            if lines[-1].startswith(("ready", "{")):
                break
        assert lines[-1].startswith("ready"), up.log()
        yield lines
    finally:
        assert up.stop() == 0


def url_of(said: list[str]) -> str:
    return next(line for line in said if "base_url" in line).split('"')[1]


def address_of(said: list[str]) -> str:
    return said[-1].split()[4]


def test_up_downloads_both_models_and_says_what_was_chosen(
    said: list[str], hub: LocalHub, home: Path
) -> None:
    log = (home / "stderr").read_text()
    assert "the drafter is Qwen/Qwen3-0.6B: the smallest model of the family Qwen3" in log
    assert "downloaded Qwen/Qwen3-8B" in log
    assert [line.split()[0] for line in said[:4]] == ["verifier", "drafter", "retrieval", "orchestrator"]
    assert any(line.startswith("target       Qwen/Qwen3-8B on cpu in float32") for line in said)
    assert "drafter      Qwen/Qwen3-0.6B: the smallest model of the family Qwen3" in said


def test_ids_with_the_chosen_drafter_equal_plain_decoding(said: list[str]) -> None:
    with Client(address_of(said)) as client:
        assert "drafter" in client.models()[0].sources
        sampled = client.generate(**REQUEST, sources=["drafter"])
        assert sampled.ids == client.generate(**REQUEST, speculation=False).ids
        greedy = {**REQUEST, "temperature": 0, "max_tokens": 200}
        plain = client.generate(**greedy, speculation=False)

        def drafts_count() -> bool:
            drafted = client.generate(**greedy, sources=["drafter"])
            assert drafted.ids == plain.ids
            return drafted.usage.accepted_by_source.get("drafter", 0) > 0

        until(drafts_count)  # a busy machine's drafts can come too late for one request


def test_the_printed_program_runs_as_it_stands(said: list[str]) -> None:
    at = said.index("paste into a program:")
    program = "\n".join(line.strip() for line in said[at + 1 : at + 3])
    found: dict[str, object] = {"openai": openai}
    exec(program.replace("client.chat", "answer = client.chat"), found)
    assert found["answer"].choices[0].message.role == "assistant"  # type: ignore[attr-defined]


def test_chat_in_a_pipe_prints_the_answers_of_the_http_api_and_nothing_else(said: list[str]) -> None:
    url = url_of(said)
    flags = ["--address", address_of(said), "--url", url.removesuffix("/v1"), "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "outrider.cli", "chat", *flags, "--max-tokens", "12"],
        input="hello\n\nand again\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    client, messages, answers = openai.OpenAI(base_url=url, api_key="none"), [], []
    for text in ("hello", "and again"):
        messages.append({"role": "user", "content": text})
        asked = {"model": "Qwen/Qwen3-8B", "temperature": 0, "max_tokens": 12}
        answer = client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        answers.append(answer.choices[0].message.content)
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_a_wrong_token_ends_up_with_one_clear_line(hub: LocalHub, tmp_path: Path) -> None:
    hub.token = "hf_right"
    try:
        up = start(hub, tmp_path, "Qwen/Qwen3-8B", "--json")
        out, _ = up.communicate(timeout=100)
    finally:
        hub.token = ""
    assert up.returncode == 1
    assert b"it is private" in out
    assert out.count(b"\n") == 1
