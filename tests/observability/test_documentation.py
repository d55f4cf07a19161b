"""docs/metrics.md tells of all that real services export; dashboard, alerts and autoscalers name no more."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from drafter_service.service import build as build_drafter
from drafter_service.settings import DrafterSettings
from orchestrator.fleet.verifier_link import VerifierLost
from orchestrator.front.http.errors import describe_error
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.service import build as build_orchestrator
from orchestrator.settings import OrchestratorSettings
from outrider.learning.metrics import LearningMetrics
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.wire.status import status_of
from retrieval_service.service import build as build_retrieval
from retrieval_service.settings import RetrievalSettings
from speculative import errors
from tests.verifier.support.harness import serving
from tests.verifier.support.ngram_lm import NgramLM
from verifier_service.learning.service import HeadLearningMetrics

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/helm/outrider/files"
TEXT = (ROOT / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `(outrider_\w+)` \|([^|]*)\|", re.MULTILINE)
ERROR = re.compile(r"^\| `(\w+)` \| ([A-Z_]+) \| (\d+) \|", re.MULTILINE)
NAME = re.compile(r"\boutrider_\w+")

ROLES = ("orchestrator", "verifier", "drafter", "retrieval")


@pytest.fixture
async def exported() -> dict[str, list[Metric]]:
    """By role, what its registry tells once a request has been decoded."""
    found: dict[str, list[Metric]] = {}
    front = Metrics("orchestrator")
    settings = OrchestratorSettings(verifier=("127.0.0.1:1",))
    service = await build_orchestrator(ServiceContext(settings, "", front, lambda error: None))
    await service.start()
    found["orchestrator"] = list(front.registry.collect())
    await service.stop(0.0)
    async with serving(NgramLM(8)) as verifier:
        await verifier.generate([1, 2, 3, 1, 2], new=20, sources=[("lookup", "")])
        HeadLearningMetrics(verifier.metrics)  # which only a verifier whose head learns has
        found["verifier"] = list(verifier.metrics.registry.collect())
    drafter = Metrics("drafter")
    unused = DrafterSettings(model="unused")
    await build_drafter(ServiceContext(unused, "", drafter, lambda error: None))
    LearningMetrics(drafter)  # which only a drafter that learns has
    found["drafter"] = list(drafter.registry.collect())
    retrieval = Metrics("retrieval")
    await build_retrieval(ServiceContext(RetrievalSettings(), "", retrieval, lambda error: None))
    found["retrieval"] = list(retrieval.registry.collect())
    return {role: [one for one in found[role] if one.name.startswith("outrider_")] for role in ROLES}


def name_of(metric: Metric) -> str:
    """As people call it, and as the table has it."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def series_of(metric: Metric) -> Iterator[str]:
    """As queries call what it brings."""
    yield name_of(metric)
    if metric.type == "histogram":
        yield from (f"{metric.name}_{end}" for end in ("bucket", "sum", "count"))


def documented() -> dict[str, set[str]]:
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(TEXT)}


async def test_every_metric_that_processes_export_is_in_the_table_and_no_other(
    exported: dict[str, list[Metric]],
) -> None:
    names = {name_of(metric) for metrics in exported.values() for metric in metrics}
    assert names == set(documented())
    assert len(names) > 70


async def test_labels_are_the_documented_ones(exported: dict[str, list[Metric]]) -> None:
    table = documented()
    seen = 0
    for metrics in exported.values():
        for metric in metrics:
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    seen += 1
                    assert set(sample.labels) - {"le"} == table[name_of(metric)], metric.name
    assert seen > 100


async def test_what_vllm_counts_too_comes_from_one_kind_of_process(exported: dict[str, list[Metric]]) -> None:
    owners: dict[str, list[str]] = {}
    for role, metrics in exported.items():
        for metric in metrics:
            owners.setdefault(metric.name, []).append(role)
    shared = {name: roles for name, roles in owners.items() if len(roles) > 1}
    of_every_process = {
        "outrider_info",
        "outrider_loop_stall_seconds",
        "outrider_loop_longest_stall_seconds",
        "outrider_malformed_messages",
    }
    assert set(shared) == of_every_process
    for role, metrics in exported.items():
        others = [other for other in ROLES if other != role]
        assert not [one for one in metrics if one.name.startswith(tuple(f"outrider_{r}_" for r in others))]


@pytest.mark.parametrize("file", ["dashboard.json", "alerts.yaml", "../values.yaml"])
async def test_every_metric_that_a_file_names_is_exported(
    file: str, exported: dict[str, list[Metric]]
) -> None:
    known = {series for metrics in exported.values() for one in metrics for series in series_of(one)}
    named = set(NAME.findall((FILES / file).read_text()))
    assert named - known == set()
    assert len(named) >= 6


SELECTED = re.compile(r"\b(outrider_\w+)(?:\{([^}]*)\})?")
MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)")
SCRAPED = {"le", "pod", "instance", "namespace", "service", "job"}
"""Labels of buckets, and those that Prometheus adds to each series that it scrapes."""


def unknown_labels(expression: str) -> set[tuple[str, str]]:
    """Labels in a query that none of its metrics has; a bucket, sum or count has those of its histogram."""
    table = documented()
    has = {
        name: table[name if name in table else re.sub(r"_(bucket|sum|count)$", "", name)] | SCRAPED
        for name, _ in SELECTED.findall(expression)
    }
    matched = {
        (name, label) for name, text in SELECTED.findall(expression) for label in MATCHED.findall(text)
    }
    grouped = {label.strip() for text in GROUPED.findall(expression) for label in text.split(",")} - {""}
    anyone = set().union(*has.values())
    return {(name, label) for name, label in matched if label not in has[name]} | {
        ("by", label) for label in grouped - anyone
    }


def test_dashboard_and_alerts_name_only_labels_that_their_metrics_have() -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    (group,) = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    queries += [rule["expr"] for rule in group["rules"]]
    assert len(queries) > 60
    assert {query: found for query in queries if (found := unknown_labels(query))} == {}


def test_a_label_that_a_metric_lacks_would_be_found() -> None:
    assert unknown_labels('sum by (tenant) (rate(outrider_request_success_total{reason="x"}[5m]))') == {
        ("by", "tenant"),
        ("outrider_request_success_total", "reason"),
    }


def test_a_name_that_nobody_exports_would_be_found() -> None:
    assert NAME.findall('rate(outrider_nothing_total{a="b"}[5m])') == ["outrider_nothing_total"]


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    board: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["targets"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count("{") == target["expr"].count("}")


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    (group,) = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 10
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].rstrip().endswith(".")
        assert rule["expr"].count("(") == rule["expr"].count(")")


MADE: dict[str, BaseException] = {
    "StaleEpoch": errors.StaleEpoch("x", 1),
    "Overloaded": errors.Overloaded("x", 1.0),
    "QuotaExceeded": errors.QuotaExceeded("x", 1.0),
    "ModelRefused": errors.ModelRefused("x", "mamba"),
    "FieldRefused": FieldRefused("n", "x"),
    "VerifierLost": VerifierLost("x"),
    "internal": ValueError("x"),
}


def test_every_error_is_in_the_table_with_its_statuses() -> None:
    family = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.OutriderError)
    }
    table = {name: (code, int(status)) for name, code, status in ERROR.findall(TEXT)}
    assert family | set(MADE) == set(table)
    for name, (code, status) in table.items():
        error = MADE.get(name) or getattr(errors, name)("x")
        assert isinstance(error, Exception)
        assert (status_of(error).code.name, describe_error(error)[0]) == (code, status), name
