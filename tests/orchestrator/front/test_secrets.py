"""What is secret stays so: nothing of it in logs, answers, metrics, arguments or what Python shows."""

import contextlib
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from orchestrator.settings import OrchestratorSettings
from outrider.client import Client
from outrider.runtime.children import ServiceProcess, stop_all
from outrider.wire.keys import key_digest, new_key
from speculative.errors import OutriderError
from tests.certificates import Authority
from tests.integration.live import until
from tests.orchestrator.fronts import write_keys

PASSWORD = "hunter2-hunter2"
URL = f"redis://:{PASSWORD}@127.0.0.1:1/0"


def test_settings_show_no_secret() -> None:
    settings = OrchestratorSettings(verifier=["127.0.0.1:1"], store="redis", redis_url=URL)
    assert PASSWORD not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


def test_a_client_shows_no_key() -> None:
    key = new_key()
    with Client("127.0.0.1:1", api_key=key) as client:
        assert key not in f"{client!r} {client.__dict__.get('_credentials')!r}"
        with pytest.raises(OutriderError) as failed:
            client.models()
    assert key not in f"{failed.value!r} {failed.value.__cause__!r}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "redis").write_text(URL)
    return tmp_path


def fetch(url: str, key: str, body: bytes | None = None) -> str:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=100) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.headers} {error.read().decode()}"


def test_a_process_tells_nobody(folder: Path) -> None:
    """At its most talkative, of good and bad callers, files that turn to rubbish, a store that is away."""
    ours = Authority(folder / "ours")
    (key,) = write_keys(folder / "keys", ["ours"], requests_per_minute=2)
    digest, bad, pasted = key_digest(key), new_key(), new_key()
    files = ours.role("orchestrator")
    flags = ["--verifier", "127.0.0.1:1", "--http-bind", "127.0.0.1:0", "--log-level", "debug"]
    flags += ["--store", "redis", "--redis-url-file", str(folder / "redis")]
    flags += ["--api-keys-file", str(folder / "keys")]
    for name, path in files.items():
        flags += [f"--{name.replace('_', '-')}", str(path)]
    log, heard = folder / "log", []
    process = ServiceProcess.start("orchestrator", "orchestrator", flags, log_path=log)
    try:
        process.wait_ready(250)
        heard.append(Path(f"/proc/{process.pid}/cmdline").read_text())
        for shown in (key, bad, key, key):
            with Client(process.address, api_key=shown) as client:
                for call in (client.models, lambda: client.generate(ids=[5])):  # called at once
                    with contextlib.suppress(OutriderError):
                        heard.append(repr(call()))
            heard.append(fetch(f"{process.http}/v1/completions", shown, b'{"prompt": "a"}'))
        (folder / "keys").write_text(f"{pasted}\n{json.dumps({'sha256': pasted})}\n")
        secret = files["tls_key"].read_text()
        files["tls_key"].write_text(secret.replace("BEGIN", "BEGUN"))

        def read_again() -> bool:
            heard.append(fetch(f"{process.http}/v1/models", key))
            return log.read_text().count("what was read before goes on") >= 2  # keys and certificate

        until(read_again)
        heard.append(fetch(f"http://{process.metrics}/metrics", key))
    finally:
        stop_all([process], 5)
    heard.append(log.read_text())
    assert re.search(r"api_keys_file: line 1: .*what was read before goes on", heard[-1]), heard[-1]
    lines = [line for line in secret.splitlines() if "-----" not in line]
    for secret in (PASSWORD, key, bad, digest, pasted, *lines):
        assert not [text for text in heard if secret in text]
