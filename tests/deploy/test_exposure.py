"""What leads to OpenAI's API from outside a cluster, and the pod that `helm test` runs."""

import jsonschema
import pytest
import yaml
from helm_python.errors import HelmError
from rendering import DEPLOY, HTTP_PORT, Object, example, of_kind, render, role_of, workloads
from typer.testing import CliRunner

from outrider.cli.app import app

# What the Gateway API says of the fields used here; anything else is refused, so that a slip is seen.
DURATION = {"pattern": r"^\d{1,5}(h|m|s|ms)$"}
PARENTS: Object = {
    "type": "array",
    "minItems": 1,
    "items": {
        "additionalProperties": False,
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}},
    },
}
HTTP_ROUTE: Object = {
    "additionalProperties": False,
    "required": ["parentRefs", "rules"],
    "properties": {
        "parentRefs": PARENTS,
        "hostnames": {"type": "array", "items": {"type": "string"}},
        "rules": {
            "items": {
                "additionalProperties": False,
                "properties": {
                    "matches": {
                        "items": {
                            "additionalProperties": False,
                            "properties": {
                                "path": {
                                    "additionalProperties": False,
                                    "required": ["type", "value"],
                                    "properties": {
                                        "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                        "value": {"pattern": "^/"},
                                    },
                                }
                            },
                        }
                    },
                    "timeouts": {
                        "additionalProperties": False,
                        "properties": {
                            name: {"pattern": r"^\d{1,5}(h|m|s|ms)$"}
                            for name in ("request", "backendRequest")
                        },
                    },
                    "backendRefs": {
                        "items": {
                            "additionalProperties": False,
                            "required": ["name"],
                            "properties": {"name": {}, "port": {"type": "integer"}, "group": {}, "kind": {}},
                        }
                    },
                },
            }
        },
    },
}

# The same for the Gateway API Inference Extension; the example was held against its definition of 2026-08-18.
INFERENCE_POOL: Object = {
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"additionalProperties": {"type": "string", "maxLength": 63}}},
        },
        "targetPorts": {
            "maxItems": 8,
            "items": {"additionalProperties": False, "properties": {"number": {"type": "integer"}}},
        },
        "endpointPickerRef": {
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "name": {"type": "string"},
                "port": {"additionalProperties": False, "properties": {"number": {"type": "integer"}}},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


def front_ports(objects: list[Object]) -> dict[str, dict[str, int]]:
    """Ports by name of each service, by the service's name."""
    return {
        one["metadata"]["name"]: {port["name"]: port["port"] for port in one["spec"]["ports"]}
        for one in of_kind(objects, "Service")
    }


def test_an_ingress_leads_to_the_http_port_under_its_certificate() -> None:
    (ingress,) = of_kind(example("ingress"), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = path["backend"]["service"]
    assert front_ports(example("ingress"))[service["name"]][service["port"]["name"]] == HTTP_PORT
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "llm-example-com"}]


def test_a_route_leads_to_the_http_port() -> None:
    (route,) = of_kind(example("gateway"), "HTTPRoute")
    jsonschema.validate(route["spec"], HTTP_ROUTE)
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert front_ports(example("gateway"))[backend["name"]]["http"] == backend["port"]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"ingress": {"enabled": True, "host": "a.example"}}, r"set http\.enabled"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}, r"set http\.enabled"),
        ({"http": {"enabled": True}, "ingress": {"enabled": True}}, r"ingress\.host"),
        ({"http": {"enabled": True}, "httpRoute": {"enabled": True}}, r"httpRoute\.parentRefs"),
    ],
)
def test_a_way_that_leads_nowhere_is_refused(values: Object, what: str) -> None:
    with pytest.raises(HelmError, match=what):
        render(values)


def test_an_inference_pool_selects_the_orchestrators_of_the_chart() -> None:
    text = (DEPLOY / "examples/gateway/inferencepool.yaml").read_text()
    pool, route = yaml.safe_load_all(text)
    objects = example("http")
    selector = pool["spec"]["selector"]["matchLabels"]
    found = {
        role
        for role, workload, _ in workloads(objects)
        if selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    }
    assert found == {"orchestrator"}
    jsonschema.validate(pool["spec"], INFERENCE_POOL)
    assert pool["spec"]["targetPorts"] == [{"number": HTTP_PORT}]
    jsonschema.validate(route["spec"], HTTP_ROUTE)
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


@pytest.mark.parametrize("secured", [False, True])
def test_helm_test_calls_the_orchestrator_with_a_command_that_there_is(secured: bool) -> None:
    secret = {"name": "mine", "key": "key"}
    objects = render({"test": {"apiKeySecret": secret, "caSecret": secret}} if secured else None)
    (pod,) = of_kind(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    (orchestrator,) = [c for role, _, c in workloads(objects) if role == "orchestrator"]
    assert container["image"] == orchestrator["image"]
    program, *arguments = container["command"]
    assert program == "outrider"
    (address,) = [one.removeprefix("--address=") for one in arguments if one.startswith("--address=")]
    name, port = address.split(":")
    assert front_ports(objects)[name]["grpc"] == int(port)
    nobody = [one if one != f"--address={address}" else "--address=127.0.0.1:1" for one in arguments]
    answer = CliRunner().invoke(app, [one for one in nobody if not one.startswith("--ca=")])
    assert answer.exit_code != 2, answer.output  # the flags are right; nobody serves there
    if secured:
        assert container["env"][0]["valueFrom"]["secretKeyRef"] == secret
        assert "--ca=/ca/key" in arguments


def test_the_test_pod_is_in_no_plain_manifest() -> None:
    plain = list(yaml.safe_load_all((DEPLOY / "examples/plain/manifest.yaml").read_text()))
    assert plain
    assert not of_kind(plain, "Pod")
    assert role_of(of_kind(render(), "Pod")[0]) == "test"


def test_verifiers_alone_reach_the_port_for_devices_drafts() -> None:
    objects = example("edge")
    ((_, workload, container),) = [it for it in workloads(objects) if it[0] == "orchestrator"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables["OUTRIDER_ORCHESTRATOR__EDGE_ADVERTISE"]["value"] == "$(POD_IP):50052"
    names = [one["name"] for one in container["env"]]
    assert names.index("POD_IP") < names.index("OUTRIDER_ORCHESTRATOR__EDGE_ADVERTISE")
    assert {"name": "edge", "containerPort": 50052, "protocol": "TCP"} in container["ports"]
    assert "edge" not in {name for ports in front_ports(objects).values() for name in ports}
    (policy,) = [one for one in of_kind(objects, "NetworkPolicy") if role_of(one) == "orchestrator"]
    (rule,) = [one for one in policy["spec"]["ingress"] if one["ports"][0]["port"] == 50052]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "verifier"
    assert workload["kind"] == "Deployment"


@pytest.mark.parametrize("variant", ["", "secured"])
def test_the_front_announces_plain_http2_only_where_it_serves_it(variant: str) -> None:
    """Gateways and meshes speak what `appProtocol` says; before TLS it would be the wrong thing."""
    objects = example(variant)
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    ports = services["outrider-orchestrator"]["spec"]["ports"]
    (grpc,) = [port for port in ports if port["name"] == "grpc"]
    assert grpc.get("appProtocol") == (None if variant == "secured" else "kubernetes.io/h2c")
