"""What autoscalers do when the metrics that they follow are missing."""

import pytest
from helm_python.chart import Chart
from helm_python.errors import HelmError
from rendering import CHART, example, of_kind


def test_a_lost_prometheus_leaves_the_number_of_pods_as_it_is() -> None:
    """With `fallback` KEDA would scale to that number, and take an empty answer for no load at all."""
    scaled = of_kind(example("keda"), "ScaledObject")
    assert scaled
    for one in scaled:
        assert "fallback" not in one["spec"]
        for trigger in one["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_no_role_may_shrink_to_nothing_since_its_own_pods_export_what_scales_it() -> None:
    with Chart.load(str(CHART)) as chart, pytest.raises(HelmError):
        chart.validate_schema({"drafter": {"autoscaling": {"enabled": True, "minReplicas": 0}}})
