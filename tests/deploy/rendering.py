"""The chart as Helm's engine renders it, and the settings that processes would read from it."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/outrider"
EXAMPLES = {path.stem: path for path in sorted((DEPLOY / "examples/values").glob("*.yaml"))}
ROLES = ("orchestrator", "verifier", "drafter", "retrieval")
MODULES = {
    "orchestrator": "orchestrator",
    "verifier": "verifier_service",
    "drafter": "drafter_service",
    "drafter-2": "drafter_service",
    "retrieval": "retrieval_service",
}
GRPC_PORT, METRICS_PORT, HTTP_PORT, EDGE_PORT = 50051, 9464, 8000, 50052

Object = dict[str, Any]


def render(values: Object | None = None, name: str = "outrider") -> list[Object]:
    """Every object of a release."""
    return render_chart(CHART, values, name)


def render_chart(path: Path, values: Object | None = None, name: str = "outrider") -> list[Object]:
    """Every object of a release of the chart in a folder."""
    with Chart.load(str(path)) as chart:
        rendered = chart.render(values or {}, name=name, namespace="serving")
    texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


@cache
def _example(name: str) -> list[Object]:
    return render(yaml.safe_load(EXAMPLES[name].read_text()) if name else None)


def example(name: str) -> list[Object]:
    """Every object of an example; empty: of the chart's own values."""
    return _example(name)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def role_of(one: Object) -> str:
    return str(one["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def workloads(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Role, workload and its one container, of our own processes."""
    for one in of_kind(objects, "Deployment", "StatefulSet"):
        if role_of(one) in MODULES:
            (container,) = one["spec"]["template"]["spec"]["containers"]
            yield role_of(one), one, container


def variables(container: Object) -> dict[str, str]:
    """What its process would find in the environment; what comes from a secret is a URL."""
    return {one["name"]: one.get("value", "rediss://secret:6379/0") for one in container["env"]}


def settings_class(role: str) -> Any:
    """What a role reads its settings with. Raises ModuleNotFoundError where the role is not there."""
    module = importlib.import_module(f"{MODULES[role]}.settings")
    return getattr(module, f"{role.removesuffix('-2').title()}Settings")


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def metric_of(query: str) -> str:
    """The metric that a query of ours asks for."""
    (name,) = re.findall(r"outrider_\w+(?=[{)])", query)
    return str(name)
