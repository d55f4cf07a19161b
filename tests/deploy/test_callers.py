"""Who may call whom: policies admit the callers that the same values, and the documentation, speak of."""

import pytest
from rendering import GRPC_PORT, METRICS_PORT, Object, example, matches, of_kind, render, role_of


def admitted(objects: list[Object], role: str, port: int) -> list[Object]:
    """The peers that may call a role's port."""
    (policy,) = [one for one in of_kind(objects, "NetworkPolicy") if role_of(one) == role]
    return [
        peer
        for rule in policy["spec"]["ingress"]
        if port in {one["port"] for one in rule["ports"]}
        for peer in rule["from"]
    ]


def from_outside(peer: Object) -> bool:
    return "namespaceSelector" in peer or "ipBlock" in peer


@pytest.mark.parametrize("name", ["ingress", "gateway", "download"])
def test_an_example_that_leads_in_from_outside_admits_who_comes_from_there(name: str) -> None:
    objects = example(name)
    fronts = [*of_kind(objects, "Ingress", "HTTPRoute"), *balancers(objects)]
    assert fronts
    peers = admitted(objects, "orchestrator", GRPC_PORT)
    assert any(from_outside(peer) for peer in peers)
    assert {"ipBlock": {"cidr": "0.0.0.0/0"}} not in peers, "whoever copies an example serves nobody unknown"


def balancers(objects: list[Object]) -> list[Object]:
    return [one for one in of_kind(objects, "Service") if one["spec"].get("type") == "LoadBalancer"]


def test_helm_test_is_admitted_where_clients_are_few() -> None:
    objects = render({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "mine"}}}]}})
    (pod,) = of_kind(objects, "Pod")
    peers = admitted(objects, "orchestrator", GRPC_PORT)
    assert any(matches(peer["podSelector"]["matchLabels"], pod["metadata"]["labels"]) for peer in peers)


@pytest.mark.parametrize("role", ["verifier", "drafter", "retrieval"])
def test_operators_are_admitted_by_the_workers_that_they_load_and_inspect(role: str) -> None:
    operator = {"podSelector": {"matchLabels": {"app": "loader"}}}
    objects = render({"retrieval": {"enabled": True}, "networkPolicy": {"operators": [operator]}})
    assert operator in admitted(objects, role, GRPC_PORT)
    assert operator not in admitted(render({"retrieval": {"enabled": True}}), role, GRPC_PORT)


@pytest.mark.parametrize(("given", "port"), [("clients", GRPC_PORT), ("monitoring", METRICS_PORT)])
def test_an_empty_list_of_callers_admits_nobody(given: str, port: int) -> None:
    """Kubernetes takes a rule with no peers for one that admits all of them."""
    objects = render({"networkPolicy": {given: []}})
    for policy in of_kind(objects, "NetworkPolicy"):
        assert all(rule["from"] for rule in policy["spec"]["ingress"])
    assert not [one for one in admitted(objects, "orchestrator", port) if role_of_peer(one) != "test"]


def role_of_peer(peer: Object) -> str:
    return str(peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component", ""))
