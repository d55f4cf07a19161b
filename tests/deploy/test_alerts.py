"""The alerts as Prometheus evaluates them, by `promtool`; skipped where there is none."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from rendering import CHART

from orchestrator.metrics import ACCEPTANCE_LENGTHS

ALERTS = CHART / "files/alerts.yaml"
BEFORE, AFTER = 24 * 60, 60
"""Minutes of the usual text, and of the text that follows."""


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


def bucket(bound: float | None, usual: float, then: float) -> dict[str, str]:
    """A bucket of the histogram of requests, ten a minute, whose acceptance length changes once.

    Three in ten requests have a neighbouring length, half of them longer.
    """

    def a_minute(length: float) -> float:
        near = zip((length * 0.8, length, length * 1.2), (1.5, 7, 1.5), strict=True)
        return sum(count for one, count in near if bound is None or max(one, 1.0) <= bound)

    before, after = a_minute(usual), a_minute(then)
    le = "+Inf" if bound is None else f"{bound:g}"
    name = f'outrider_orchestrator_acceptance_length_bucket{{model_name="m",le="{le}"}}'
    return {
        "series": name,
        "values": f"0+{before}x{BEFORE} {before * BEFORE + after}+{after}x{AFTER}",
    }


def expecting(usual: float, then: float, *, alert: bool) -> dict[str, object]:
    """A unit test of promtool: whether the alert fires when the text has changed."""
    rule = json.loads(json.dumps(annotations("OutriderUnusualText")).replace("{{ $labels.model_name }}", "m"))
    labels = {"severity": "warning", "model_name": "m"}
    fired = [{"exp_labels": labels, "exp_annotations": rule}] if alert else []
    found = {"eval_time": f"{BEFORE + AFTER}m", "alertname": "OutriderUnusualText", "exp_alerts": fired}
    quiet = {"eval_time": f"{BEFORE}m", "alertname": "OutriderUnusualText", "exp_alerts": []}
    series = [bucket(bound, usual, then) for bound in (*ACCEPTANCE_LENGTHS, None)]
    return {"interval": "1m", "input_series": series, "alert_rule_test": [quiet, found]}


def annotations(alert: str) -> dict[str, str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    found: dict[str, str] = next(
        rule["annotations"] for group in groups for rule in group["rules"] if rule["alert"] == alert
    )
    return found


def test_prometheus_takes_every_rule() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("usual", "then", "alert"),
    [
        (1.8, 6.0, True),  # text that loops is easy to draft for
        (1.8, 1.1, True),  # garbled text is hard to draft for
        (5.0, 1.4, True),
        (1.8, 2.2, False),  # another kind of request
        (1.0, 1.0, False),  # plain decoding
        (1.05, 1.2, False),
    ],
)
def test_text_that_loops_or_garbles_is_told_from_usual_text(
    usual: float, then: float, alert: bool, tmp_path: Path
) -> None:
    file = tmp_path / "tests.yaml"
    unit = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m"}
    file.write_text(json.dumps(unit | {"tests": [expecting(usual, then, alert=alert)]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_requests_that_all_fail_are_noticed_before_any_has_ever_succeeded(tmp_path: Path) -> None:
    """An orchestrator exports no count of successes until there is one."""
    text = annotations("OutriderRequestsFail")
    summary = text["summary"].replace("{{ $value | humanizePercentage }}", "100%")
    fired = {"exp_labels": {"severity": "critical"}, "exp_annotations": {**text, "summary": summary}}
    errors = {"series": 'outrider_orchestrator_request_errors_total{reason="internal"}', "values": "0+6x30"}
    found = {"eval_time": "20m", "alertname": "OutriderRequestsFail", "exp_alerts": [fired]}
    case = {"interval": "1m", "input_series": [errors], "alert_rule_test": [found]}
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
