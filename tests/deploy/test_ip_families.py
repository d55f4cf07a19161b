"""Processes with what the chart gives them in clusters with IPv6: they answer over IPv6 and over IPv4."""

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import MODULES, example, of_kind, variables, workloads

from orchestrator.settings import OrchestratorSettings
from outrider import Client
from outrider.runtime.children import ServiceProcess, stop_all
from outrider.runtime.settings import read_settings

POD_IP = "fd00:10:244::a"
FAMILIES = ("[::1]", "127.0.0.1")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def processes(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServiceProcess]]:
    """A verifier and an orchestrator with the example's variables, but for free ports."""
    logs = tmp_path_factory.mktemp("families")
    containers = {role: container for role, _, container in workloads(example("dual-stack"))}
    started: dict[str, ServiceProcess] = {}

    def start(role: str, **changed: str) -> None:
        prefix = f"OUTRIDER_{role.upper()}__"
        given = variables(containers[role]) | {prefix + key: value for key, value in changed.items()}
        free = {name: f"{at.rpartition(':')[0]}:0" for name, at in given.items() if name.endswith("BIND")}
        env = {name: value.replace("$(POD_IP)", POD_IP) for name, value in (given | free).items()}
        started[role] = ServiceProcess.start(role, MODULES[role], env=env, log_path=logs / role)
        started[role].wait_ready(250)

    try:
        start("verifier", MODEL=str(tiny_llama), THREADS="1")
        port = started["verifier"].address.rpartition(":")[2]
        start("orchestrator", VERIFIER=f"dns:[::1]:{port}", DRAFTER="")
        yield started
    finally:
        stop_all(started.values(), 10)


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", FAMILIES)
def test_probes_and_requests_are_answered_over_both_families(
    processes: dict[str, ServiceProcess], host: str
) -> None:
    for process in processes.values():
        port = process.metrics.rpartition(":")[2]
        with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=100) as answer:
            assert answer.status == 200
    with Client(f"{host}:{processes['orchestrator'].address.rpartition(':')[2]}") as client:
        assert len(client.generate(ids=[5, 6, 7], max_tokens=4, ignore_eos=True).ids) == 4
    http = processes["orchestrator"].http.rpartition(":")[2]
    with urllib.request.urlopen(f"http://{host}:{http}/v1/models", timeout=100) as answer:
        assert answer.status == 200


def test_verifiers_reach_the_devices_of_a_pod_with_an_ipv6_address() -> None:
    (container,) = [one for role, _, one in workloads(example("dual-stack")) if role == "orchestrator"]
    given = {name: value.replace("$(POD_IP)", POD_IP) for name, value in variables(container).items()}
    assert read_settings(OrchestratorSettings, [], given).edge_advertise == f"[{POD_IP}]:50052"


def test_clients_find_both_families_and_workers_are_found_once() -> None:
    services = of_kind(example("dual-stack"), "Service")
    front = [one for one in services if one["spec"].get("clusterIP") != "None"]
    assert [one["spec"]["ipFamilyPolicy"] for one in front] == ["PreferDualStack"]
    assert not any("ipFamilyPolicy" in one["spec"] for one in services if one not in front)
