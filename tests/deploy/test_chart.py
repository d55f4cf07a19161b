"""The chart, rendered for every example: valid Kubernetes, and true to the processes that it starts."""

import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
from rendering import (
    CHART,
    DEPLOY,
    EDGE_PORT,
    EXAMPLES,
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    ROLES,
    ROOT,
    Object,
    example,
    matches,
    of_kind,
    render,
    role_of,
    settings_class,
    variables,
    workloads,
)

from outrider.runtime.settings import read_settings

OLDEST, NEWEST = "1.27", "1.37"
VARIANTS = ("", *EXAMPLES)
INFORMATION = 1
FRONT = "outrider-orchestrator"
CUSTOM = {"ScaledObject", "ServiceMonitor", "HTTPRoute"}
WITH_HTTP = {"http", "ingress", "gateway", "edge", "dual-stack"}
WITH_EDGE = {"edge", "dual-stack"}

# What their definitions say of the fields used here; anything else is refused, so that a slip is seen.
WHOLE = {"type": "integer", "minimum": 0}
SCALED_OBJECT: Object = {
    "additionalProperties": False,
    "required": ["scaleTargetRef", "triggers"],
    "properties": {
        "scaleTargetRef": {
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"apiVersion": {"const": "apps/v1"}, "kind": {}, "name": {"type": "string"}},
        },
        "minReplicaCount": WHOLE,
        "maxReplicaCount": WHOLE,
        "pollingInterval": WHOLE,
        "cooldownPeriod": WHOLE,
        "advanced": {"required": ["horizontalPodAutoscalerConfig"]},
        "triggers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "prometheus"},
                    "metadata": {
                        "required": ["serverAddress", "query", "threshold"],
                        "additionalProperties": {"type": "string"},
                    },
                },
            },
        },
    },
}
SERVICE_MONITOR: Object = {
    "additionalProperties": False,
    "required": ["selector", "endpoints"],
    "properties": {
        "selector": {"required": ["matchLabels"]},
        "namespaceSelector": {"required": ["matchNames"]},
        "endpoints": {
            "items": {
                "additionalProperties": False,
                "properties": {"port": {"type": "string"}, "path": {}, "interval": {"pattern": r"^\d+s$"}},
            }
        },
    },
}


@cache
def validate(text: str, version: str) -> None:
    """Once where several variants have the same object: it takes a tenth of a second."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_in_the_oldest_and_newest_kubernetes(variant: str, version: str) -> None:
    objects = example(variant)
    assert objects
    for one in objects:
        if one["kind"] not in CUSTOM:
            validate(json.dumps(one), version)


@pytest.mark.parametrize(
    ("kind", "schema"), [("ScaledObject", SCALED_OBJECT), ("ServiceMonitor", SERVICE_MONITOR)]
)
def test_objects_of_other_projects_have_the_fields_that_these_know(kind: str, schema: Object) -> None:
    found = of_kind(example("keda"), kind)
    assert len(found) == 3
    for one in found:
        jsonschema.validate(one["spec"], schema)


def test_a_slip_in_a_manifest_would_be_found() -> None:
    (service,) = of_kind(example(""), "Service")[:1]
    slip = {**service, "spec": {**service["spec"], "selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(slip, OLDEST, strict=True)


def test_the_oldest_kubernetes_is_the_one_that_the_chart_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert kubernetes_validate.latest_version().startswith(NEWEST)


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_has_nothing_to_complain_of(variant: str) -> None:
    values = yaml.safe_load(EXAMPLES[variant].read_text()) if variant else {}
    report = lint(str(CHART), values=values, kube_version=f"v{OLDEST}.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > INFORMATION] == []


@pytest.mark.parametrize(
    "values",
    [
        {"verifier": {"replicas": 2}},
        {"common": {"autoscaling": {"kind": "vertical"}}},
        {"verifier": {"gpu": {"count": "one"}}},
        {"retriever": {}},
        {"verifier": {"settings": {"Model": "x"}}},
        {"drafter": {"autoscaling": {"triggers": [{"metric": "cpu", "target": "80"}]}}},
        {"bindHost": "::"},
    ],
)
def test_values_that_nobody_reads_are_refused(values: Object) -> None:
    with Chart.load(str(CHART)) as chart, pytest.raises(HelmError):
        chart.validate_schema(values)


def test_every_value_is_in_the_schema() -> None:
    """A strict schema takes the chart's own values, so none is missing in it."""
    with Chart.load(str(CHART)) as chart:
        chart.validate_schema(chart.values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variable_is_a_setting_that_its_process_takes(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, workload, container in workloads(example(variant)):
        kind = settings_class(role)
        given = variables(container)
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            settings = read_settings(kind, container.get("args", []), given)
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        host = "[::]" if variant == "dual-stack" else "0.0.0.0"
        assert settings.bind == f"{host}:{ports['grpc']}"
        assert settings.metrics_bind == f"{host}:{ports['metrics']}"
        if "http" in ports:
            assert settings.http_bind == f"{host}:{ports['http']}"
        if "edge" in ports:
            assert settings.edge_bind == f"{host}:{ports['edge']}"
        spec = workload["spec"]["template"]["spec"]
        slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] >= slept + 2 * settings.grace_s + 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_the_documented_ones_and_probes_ask_the_one_that_answers_them(variant: str) -> None:
    for role, _, container in workloads(example(variant)):
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        more = {"http": HTTP_PORT} if role == "orchestrator" and variant in WITH_HTTP else {}
        more |= {"edge": EDGE_PORT} if role == "orchestrator" and variant in WITH_EDGE else {}
        assert ports == {"grpc": GRPC_PORT, "metrics": METRICS_PORT, **more}
        paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        assert paths == {
            "startup": {"path": "/readyz", "port": "metrics"},
            "liveness": {"path": "/healthz", "port": "metrics"},
            "readiness": {"path": "/readyz", "port": "metrics"},
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_run_with_as_few_rights_as_they_can(variant: str) -> None:
    for one in of_kind(example(variant), "Deployment", "StatefulSet"):
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"] for volume in pod["volumes"]}
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes | claims
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_the_pods_of_their_role_alone(variant: str) -> None:
    objects = example(variant)
    pods = {
        role_of(one): one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(objects, "Deployment", "StatefulSet")
    }
    selectors = {
        "Service": lambda one: one["spec"]["selector"],
        "PodDisruptionBudget": lambda one: one["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": lambda one: one["spec"]["podSelector"]["matchLabels"],
        "StatefulSet": lambda one: one["spec"]["selector"]["matchLabels"],
        "Deployment": lambda one: one["spec"]["selector"]["matchLabels"],
    }
    for one in of_kind(objects, *selectors):
        selector = selectors[one["kind"]](one)
        found = [role for role, labels in pods.items() if matches(selector, labels)]
        assert found == [role_of(one)], one["metadata"]["name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_lead_to_ports_that_their_pods_have(variant: str) -> None:
    objects = example(variant)
    ports = {
        role_of(one): {port["name"]: port["containerPort"] for port in c["ports"]}
        for one in of_kind(objects, "Deployment", "StatefulSet")
        for c in one["spec"]["template"]["spec"]["containers"]
    }
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert ports[role_of(service)][port["targetPort"]] == port["port"]
    (front,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Service", FRONT)]
    assert ("http" in {port["name"] for port in front["spec"]["ports"]}) == (variant in WITH_HTTP)


@pytest.mark.parametrize("variant", VARIANTS)
def test_orchestrators_dial_the_headless_services_of_all_workers(variant: str) -> None:
    objects = example(variant)
    headless = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in of_kind(objects, "Service")
        if one["spec"].get("clusterIP") == "None"
    }
    containers = {role: container for role, _, container in workloads(objects)}
    given = variables(containers["orchestrator"])
    peers = [
        peer
        for field in ("VERIFIER", "DRAFTER")
        for peer in given.get(f"OUTRIDER_ORCHESTRATOR__{field}", "").split(",")
        if peer
    ]
    assert len(peers) == len(containers) - 1
    for peer in peers:
        scheme, name, port = peer.split(":")
        assert scheme == "dns"
        assert int(port) in headless[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_policies_let_through_who_calls_whom(variant: str) -> None:
    callers = {"verifier": ["orchestrator"], "drafter": ["orchestrator", "verifier"]}
    callers["retrieval"] = callers["drafter-2"] = callers["drafter"]
    for policy in of_kind(example(variant), "NetworkPolicy"):
        role = role_of(policy)
        if role not in callers:
            continue
        calls, metrics = policy["spec"]["ingress"]
        component = "app.kubernetes.io/component"
        assert [one["podSelector"]["matchLabels"][component] for one in calls["from"]] == callers[role]
        assert [one["port"] for one in calls["ports"] + metrics["ports"]] == [GRPC_PORT, METRICS_PORT]


@pytest.mark.parametrize("variant", ["keda", "hpa"])
def test_what_an_autoscaler_scales_is_there_and_leaves_the_count_to_it(variant: str) -> None:
    objects = example(variant)
    there = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    scalers = of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler")
    assert sorted(role_of(one) for one in scalers) == ["drafter", "orchestrator", "verifier"]
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        assert "replicas" not in there[target["kind"], target["name"]]["spec"]


def test_a_role_without_triggers_cannot_be_scaled() -> None:
    with pytest.raises(HelmError, match=r"drafter\.autoscaling\.triggers"):
        render({"drafter": {"autoscaling": {"enabled": True, "triggers": []}}})


def test_monitors_find_each_metrics_port_once() -> None:
    objects = example("keda")
    services = of_kind(objects, "Service")
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (found,) = [one for one in services if matches(selector, one["metadata"]["labels"])]
        ports = {one["name"]: one["port"] for one in found["spec"]["ports"]}
        assert [ports[one["port"]] for one in monitor["spec"]["endpoints"]] == [METRICS_PORT]


@pytest.mark.parametrize(
    ("value", "text"),
    [(16_000_000, "16000000"), (0.5, "0.5"), (False, "false"), (0, "0"), ("a b", "a b"), (["a", "b"], "a,b")],
)
def test_a_setting_reaches_its_process_as_it_was_written(value: object, text: str) -> None:
    containers = {role: c for role, _, c in workloads(render({"verifier": {"settings": {"it": value}}}))}
    assert variables(containers["verifier"])["OUTRIDER_VERIFIER__IT"] == text


@pytest.mark.parametrize("name", EXAMPLES)
def test_on_a_gpu_keys_and_values_get_what_weights_and_steps_leave(name: str) -> None:
    for role, _, container in workloads(example(name)):
        settings = read_settings(settings_class(role), [], variables(container))
        if "GPU" in str(container["resources"]).upper():
            assert (settings.kv_mb, settings.cuda_graphs) == ("auto", "require")  # type: ignore[attr-defined]


def test_gpus_are_asked_for_by_the_name_that_is_given() -> None:
    limits = {role: container["resources"]["limits"] for role, _, container in workloads(example("gpu"))}
    assert limits["verifier"]["nvidia.com/gpu"] == 1
    assert limits["drafter"]["nvidia.com/mig-1g.10gb"] == 1
    assert set(limits["orchestrator"]) == {"memory"}


def test_a_second_drafter_has_the_first_ones_fields_its_own_model_and_another_name() -> None:
    containers = {role: container for role, _, container in workloads(example("two-drafters"))}
    first, second = (
        read_settings(settings_class(role), [], variables(containers[role]))
        for role in ("drafter", "drafter-2")
    )
    assert (first.name, second.name) == ("drafter", "drafter-2")
    assert (first.model, second.model) == ("/weights/code-drafter", "/weights/prose-drafter")
    assert first.device == second.device == "cuda"
    assert containers["drafter"]["resources"] == containers["drafter-2"]["resources"]


def test_a_second_drafter_without_a_model_of_its_own_is_refused() -> None:
    with pytest.raises(HelmError, match=r"drafter-2\.settings\.model"):
        render({"drafter-2": {"enabled": True}})


def test_two_releases_share_no_name() -> None:
    def names(name: str) -> set[tuple[str, str]]:
        return {(one["kind"], one["metadata"]["name"]) for one in render(name=name)}

    assert not names("first") & names("second")


@pytest.mark.parametrize("role", ROLES)
def test_what_people_set_on_pods_is_in_every_role(role: str) -> None:
    expected: dict[str, Any] = {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "priorityClassName": "high",
        "runtimeClassName": "other",
        "schedulerName": "mine",
        "initContainers": [{"name": "first", "image": "busybox:1"}],
        "imagePullSecrets": [{"name": "pull"}],
    }
    given = {"enabled": True, "env": [{"name": "A", "value": "b"}], "envFromSecret": "more", **expected}
    objects = render({role: given})
    (workload, container) = next((one, c) for name, one, c in workloads(objects) if name == role)
    pod = workload["spec"]["template"]["spec"]
    assert {key: pod[key] for key in expected} == expected
    assert {"name": "A", "value": "b"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]


def test_the_plain_manifest_is_what_the_chart_renders() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts/manifest", EXAMPLES["embedded"]],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    committed = (DEPLOY / "examples/plain/manifest.yaml").read_text()
    assert list(yaml.safe_load_all(committed)) == list(yaml.safe_load_all(ran.stdout))


def test_the_overlay_changes_what_the_plain_manifest_has() -> None:
    folder = DEPLOY / "examples/overlay"
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: list[Object] = []
    for base in overlay["resources"]:
        for file in yaml.safe_load((folder / base / "kustomization.yaml").read_text())["resources"]:
            objects += yaml.safe_load_all((folder / base / file).read_text())
    there = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    images = {re.split(r":(?!.*/)", c["image"])[0] for _, _, c in workloads(objects)}
    assert {one["name"] for one in overlay["images"]} == images
    scaled = {name for kind, name in there if kind in {"Deployment", "StatefulSet"}}
    assert {one["name"] for one in overlay["replicas"]} <= scaled
    for patch in overlay["patches"]:
        target = there[patch["target"]["kind"], patch["target"]["name"]]
        change = yaml.safe_load((folder / patch["path"]).read_text())
        (changed,) = change["spec"]["template"]["spec"]["containers"]
        (container,) = target["spec"]["template"]["spec"]["containers"]
        assert changed["name"] == container["name"]
        for one in changed["env"]:
            field = one["name"].removeprefix("OUTRIDER_VERIFIER__").lower()
            assert field in settings_class("verifier").model_fields
