"""What `outrider up` shows: progress on standard error, then models and lines to paste."""

import ast
import io
import json
import shlex
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from outrider.cli.local.announcement import computing, curl, program
from outrider.cli.local.progress_view import DownloadProgress, LoadProgress, amount
from outrider.cli.observe.gauges import read
from outrider.runtime.children import ServiceProcess

METRICS = 'outrider_cache_config_info{model_name="m",block_size="64",num_gpu_blocks="100"} 1\n'


def child(role: str, **now: Any) -> ServiceProcess:
    """A process as the view sees one."""
    state = {"role": role, "ready": False, "loaded": 0, "of": 0} | now
    return cast("ServiceProcess", SimpleNamespace(**state))


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, highlight=False), out


def test_device_dtype_and_room_are_said() -> None:
    assert computing("cuda bfloat16 static", read(METRICS, 0.0)) == (
        "cuda in bfloat16, static passes, keys and values of 6,400 tokens"
    )
    assert computing("cpu float32", read("", 0.0)) == "cpu in float32"


def test_weights_in_another_format_are_said() -> None:
    assert computing("cpu float32 bfloat16-weights", read("", 0.0)) == "cpu in float32, weights in bfloat16"
    assert computing("cpu float32 compiled int8-weights int8-kv", read(METRICS, 0.0)) == (
        "cpu in float32, weights in int8, compiled passes, keys and values of 6,400 tokens in int8"
    )


def test_ranks_are_said() -> None:
    assert computing("cpu float32 2 ranks", read("", 0.0)) == "cpu over 2 ranks in float32"
    assert computing("cuda bfloat16 static int8-kv 4 ranks", read(METRICS, 0.0)) == (
        "cuda over 4 ranks in bfloat16, static passes, keys and values of 6,400 tokens in int8"
    )


@pytest.mark.parametrize("chat", [False, True])
def test_the_lines_to_paste_parse_whatever_the_model_is_called(chat: bool) -> None:
    name, url = 'it\'s "mine"', "http://127.0.0.1:8000"
    lines = "\n".join(line.strip() for line in program(url, name, chat=chat))
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.keyword)]
    said = {node.arg: ast.literal_eval(node.value) for node in calls}
    assert (said["base_url"], said["model"]) == (f"{url}/v1", name)
    words = shlex.split(curl(url, name, chat=chat))
    assert words[1] == f"{url}/v1/{'chat/' if chat else ''}completions"
    assert json.loads(words[-1])["model"] == name


def test_where_keys_are_asked_for_the_lines_to_paste_show_one() -> None:
    said = "\n".join(program("http://127.0.0.1:8000", "m", chat=True, key=True))
    assert 'api_key=os.environ["OUTRIDER_API_KEY"]' in said
    command = curl("http://127.0.0.1:8000", "m", chat=True, key=True)
    assert '-H "authorization: Bearer $OUTRIDER_API_KEY"' in command
    assert shlex.split(command)[1] == "http://127.0.0.1:8000/v1/chat/completions"


def test_without_a_terminal_a_download_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.local.progress_view.LINE_EVERY_S", 0.0)
    shown, out = console(terminal=False)
    view = DownloadProgress(shown)
    view.began("org/m", 2_500_000_000)
    view.arrived(1_000_000_000)
    view.stalled(20.4)
    view.arrived(2_500_000_000)
    view.ended()
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "downloading org/m: 2.5 GB",
        "downloading org/m: 1.0 GB of 2.5 GB",
        "org/m: no byte for 20 s",
    ]
    assert lines[-1].startswith("downloaded org/m: 2.5 GB in ")


def test_a_download_that_failed_is_not_said_to_be_whole() -> None:
    shown, out = console(terminal=False)
    view = DownloadProgress(shown)
    view.began("org/m", 2_000)
    view.arrived(1_000)
    view.ended()
    assert "downloaded" not in out.getvalue()


def test_on_a_terminal_bars_show_bytes_and_tensors() -> None:
    shown, out = console(terminal=True)
    view = DownloadProgress(shown)
    view.began("org/m", 2_000_000)
    view.arrived(1_000_000)
    view.stalled(10)
    view.ended()
    assert "1.0/2.0 MB" in out.getvalue()
    assert "no byte for 10 s" in out.getvalue()
    with LoadProgress(shown) as loading:
        loading.show([child("verifier", loaded=3, of=10), child("drafter"), child("retrieval", ready=True)])
        loading.show([child("verifier", loaded=10, of=10)])
    assert "checks its passes" in out.getvalue()
    with LoadProgress(shown, compiles=True) as loading:
        loading.show([child("verifier", loaded=10, of=10)])
    assert "compiles its passes" in out.getvalue()
    assert "drafter" in out.getvalue()


def test_without_a_terminal_processes_that_still_start_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.local.progress_view.LINE_EVERY_S", 0.0)
    shown, out = console(terminal=False)
    with LoadProgress(shown) as loading:
        loading.show([child("verifier", loaded=3, of=10), child("retrieval", ready=True)])
    assert out.getvalue() == "starting for 0 s: verifier has loaded 3 of 10 tensors\n"


def test_amounts_are_for_people() -> None:
    assert [amount(size) for size in (12_300, 3_100_000, 16_400_000_000)] == ["12 kB", "3.1 MB", "16.4 GB"]
