"""The chart offers the alerts and the dashboard as they lie in its files, where they are asked for."""

import json
import re

import kubernetes_validate
import yaml
from rendering import CHART, of_kind, render

from orchestrator.front.http.field_faults import FieldRefused
from speculative.errors import (
    IdsNeeded,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    Superseded,
    Unauthenticated,
    UnknownModel,
    UnknownSession,
)

RULES = {"monitoring": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}}
BOARD = {"monitoring": {"dashboard": {"enabled": True}}}


def test_neither_is_there_unless_asked_for() -> None:
    assert of_kind(render(), "PrometheusRule", "ConfigMap") == []


def test_alerts_are_a_rule_of_the_operator_word_for_word() -> None:
    (rule,) = of_kind(render(RULES), "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text())


def test_requests_that_fail_by_their_senders_fault_wake_nobody() -> None:
    groups = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    found = re.search(r'reason!~"([^"]+)"', rules["OutriderRequestsFail"]["expr"])
    assert found is not None
    left_out = set(found[1].split("|"))
    faults = (InvalidRequest, UnknownModel, UnknownSession, Superseded, Unauthenticated, PermissionDenied)
    assert {error.__name__ for error in (*faults, FieldRefused, IdsNeeded, QuotaExceeded)} == left_out


def test_the_dashboard_is_a_config_map_that_grafana_s_sidecar_finds() -> None:
    (board,) = of_kind(render(BOARD), "ConfigMap")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["outrider.json"]) == json.loads(
        (CHART / "files/dashboard.json").read_text()
    )
    kubernetes_validate.validate(board, "1.27", strict=True)
