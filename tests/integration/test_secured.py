"""All roles as processes with certificates and keys: the same ids, while certificates are replaced."""

import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from outrider.runtime.children import ServiceProcess, stop_all
from speculative.errors import OutriderError, Unauthenticated, Unavailable
from tests.certificates import Authority
from tests.integration.live import REQUEST, sample, until
from tests.orchestrator.fronts import write_keys

pytestmark = pytest.mark.slow
OFFERED = "outrider_verifier_source_nodes_total"
LONG: dict[str, Any] = {"ids": [5, 9, 30], "max_tokens": 200, "temperature": 0.8, "seed": 5}


def flags(settings: dict[str, Path]) -> list[str]:
    return [part for name, path in settings.items() for part in (f"--{name.replace('_', '-')}", str(path))]


@dataclass
class Secured:
    """The processes, and the files that clients need."""

    authority: Authority
    processes: dict[str, ServiceProcess]
    commands: dict[str, list[str]]
    folder: Path
    key: str

    def start(self, role: str) -> None:
        module = role if role == "orchestrator" else f"{role}_service"
        env = {"OMP_NUM_THREADS": "1"}
        log = self.folder / f"{role}.log"
        process = ServiceProcess.start(role, module, self.commands[role], env=env, log_path=log)
        self.processes[role] = process

    def client(self) -> Client:
        return Client(self.processes["orchestrator"].address, ca=self.authority.ca, api_key=self.key)

    def models_over_http(self) -> list[str]:
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        url, headers = (
            f"{self.processes['orchestrator'].http}/v1/models",
            {"authorization": f"Bearer {self.key}"},
        )
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=100, context=context) as answer:
            return [model["id"] for model in json.loads(answer.read())["data"]]

    def drafts(self, client: Client) -> bool:
        """Whether the drafter offers anything during a request.

        The tiny drafter is slower than its target, so most of its drafts come too late to be accepted.
        """
        offered = partial(sample, self.processes["verifier"].metrics, OFFERED, source="drafter")
        before = offered(outcome="offered")
        client.generate(**LONG, sources=["drafter"])
        return offered(outcome="offered") > before


@pytest.fixture
def secured(tiny_llama: Path, tmp_path: Path) -> Iterator[Secured]:
    authority = Authority(tmp_path / "authority")
    (key,) = write_keys(tmp_path / "keys", ["ours"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    model = ["--model", str(tiny_llama), "--threads", "1", "--passes", "eager", "--log-level", "debug"]
    at = Secured(authority, {}, {}, tmp_path, key)
    at.commands["verifier"] = [*model, *flags(authority.role("verifier"))]
    at.commands["drafter"] = [
        *model,
        *flags(authority.role("drafter", "source")),
        "--bind",
        f"127.0.0.1:{port}",
    ]
    try:
        for role in ("verifier", "drafter"):
            at.start(role)
        for role in ("verifier", "drafter"):
            at.processes[role].wait_ready(250)
        at.commands["orchestrator"] = [
            *("--verifier", at.processes["verifier"].address, "--drafter", f"127.0.0.1:{port}"),
            *("--api-keys-file", str(tmp_path / "keys"), "--log-level", "debug"),
            *("--http-bind", "127.0.0.1:0"),
            *flags(authority.role("orchestrator") | authority.front()),
        ]
        at.start("orchestrator")
        at.processes["orchestrator"].wait_ready(250)
        yield at
    finally:
        stop_all(at.processes.values(), 5)


def test_a_secured_stack_answers_and_goes_on_with_new_certificates(secured: Secured) -> None:
    with secured.client() as client:
        deadline = time.monotonic() + 100
        while not any("drafter" in model.sources for model in client.models()):
            assert time.monotonic() < deadline, (secured.folder / "orchestrator.log").read_text()
            time.sleep(0.05)
        assert secured.models_over_http() == ["tiny"]
        plain = client.generate(**REQUEST, speculation=False)
        assert client.generate(**REQUEST).ids == plain.ids
        until(lambda: secured.drafts(client))
        for role in (("verifier",), ("drafter", "source"), ("orchestrator",)):
            secured.authority.role(*role)
        secured.authority.front()
        time.sleep(1.2)
        secured.processes["drafter"].stop(0.0)
        secured.start("drafter")
        secured.processes["drafter"].wait_ready(250)
        until(lambda: secured.drafts(client))
        assert client.generate(**REQUEST).ids == plain.ids
    with secured.client() as client:
        assert client.generate(**REQUEST).ids == plain.ids
    assert secured.models_over_http() == ["tiny"]
    address = secured.processes["orchestrator"].address
    with Client(address, api_key=secured.key) as stranger, pytest.raises(Unavailable):
        stranger.models()
    with Client(address, ca=secured.authority.ca) as stranger, pytest.raises(Unauthenticated):
        stranger.models()
    for role in ("verifier", "drafter"):
        address = secured.processes[role].address
        with Client(address, ca=secured.authority.ca) as stranger, pytest.raises(OutriderError):
            stranger.models()
    logs = "".join((secured.folder / f"{role}.log").read_text() for role in secured.processes)
    assert secured.key not in logs
    assert "PRIVATE KEY" not in logs
