"""Processes started with what the chart gives them: probes are answered, autoscalers' metrics are there."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rendering import MODULES, example, metric_of, of_kind, role_of, variables, workloads

from outrider import Client
from outrider.runtime.children import ServiceProcess, stop_all
from outrider.source.metrics import SourceCollector

CHART_ROLES = ("orchestrator", "verifier", "drafter")
pytestmark = pytest.mark.slow


def status(process: ServiceProcess, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{process.metrics}{path}", timeout=100) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def exported(process: ServiceProcess) -> set[str]:
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=100) as answer:
        text = answer.read().decode()
    return set(re.findall(r"^(outrider_\w+)[ {]", text, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def processes(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServiceProcess]]:
    """One per role: the chart's variables, but for free ports, a model that is here and localhost's name."""
    logs = tmp_path_factory.mktemp("deploy")
    containers = {role: container for role, _, container in workloads(example(""))}
    started: dict[str, ServiceProcess] = {}

    def start(role: str, **changed: str) -> None:
        own = {"BIND": "127.0.0.1:0", "METRICS_BIND": "127.0.0.1:0", **changed}
        env = variables(containers[role]) | {f"OUTRIDER_{role.upper()}__{key}": own[key] for key in own}
        started[role] = ServiceProcess.start(role, MODULES[role], env=env, log_path=logs / role)

    def name(role: str) -> str:
        return f"dns:localhost:{started[role].address.rpartition(':')[2]}"

    try:
        for role in ("verifier", "drafter"):
            start(role, MODEL=str(tiny_llama), THREADS="1")
        for process in started.values():
            process.wait_ready(250)
        start("orchestrator", VERIFIER=name("verifier"), DRAFTER=name("drafter"))
        started["orchestrator"].wait_ready(250)
        yield started
    finally:
        stop_all(started.values(), 10)


def test_a_request_finds_its_way_by_the_names_of_workers(processes: dict[str, ServiceProcess]) -> None:
    with Client(processes["orchestrator"].address) as client:
        deadline = time.monotonic() + 200
        while not (client.models() and "drafter" in client.models()[0].sources):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(client.generate(ids=[5, 6, 7], max_tokens=4, ignore_eos=True).ids) == 4


@pytest.mark.parametrize("role", CHART_ROLES)
def test_probes_are_answered(processes: dict[str, ServiceProcess], role: str) -> None:
    (container,) = [container for name, _, container in workloads(example("")) if name == role]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert status(processes[role], container[probe]["httpGet"]["path"]) == 200
    assert status(processes[role], "/elsewhere") == 404


@pytest.mark.parametrize("role", CHART_ROLES)
def test_every_metric_that_scales_a_role_is_exported_by_it(
    processes: dict[str, ServiceProcess], role: str
) -> None:
    asked = {
        metric_of(trigger["metadata"]["query"])
        for one in of_kind(example("keda"), "ScaledObject")
        if role_of(one) == role
        for trigger in one["spec"]["triggers"]
    }
    plain = {
        metric["pods"]["metric"]["name"]
        for one in of_kind(example("hpa"), "HorizontalPodAutoscaler")
        if role_of(one) == role
        for metric in one["spec"]["metrics"]
    }
    assert asked
    assert asked == plain
    assert asked <= exported(processes[role])


def test_retrieval_exports_what_scales_it() -> None:
    worker = pytest.importorskip("retrieval_service.worker", reason="there is no retrieval service here")
    values = yaml.safe_load((Path(__file__).parents[2] / "deploy/helm/outrider/values.yaml").read_text())
    asked = {trigger["metric"] for trigger in values["retrieval"]["autoscaling"]["triggers"]}
    collector = SourceCollector("outrider_retrieval_", lambda: None, worker.COUNTERS, worker.GAUGES)
    assert asked <= {one.name for one in collector.collect()}
