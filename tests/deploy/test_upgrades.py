"""An upgrade of a release replaces the pods that it changes, in the order that the operator gives."""

import shutil
from pathlib import Path

import pytest
from rendering import CHART, ROLES, Object, render, render_chart, workloads

EVERYONE = {"retrieval": {"enabled": True}}


def pods(objects: list[Object]) -> dict[str, Object]:
    """What each role's pods are made of; where it changes, Kubernetes replaces them."""
    return {role: workload["spec"]["template"] for role, workload, _ in workloads(objects)}


def newer(folder: Path) -> Path:
    """The chart as the next version of the software has it."""
    shutil.copytree(CHART, folder / "outrider")
    about = folder / "outrider/Chart.yaml"
    about.write_text(about.read_text().replace("ersion: 0.1.0", "ersion: 0.2.0"))
    return folder / "outrider"


def test_roles_can_be_upgraded_one_after_the_other(tmp_path: Path) -> None:
    chart = newer(tmp_path)
    before = pods(render(EVERYONE))
    values: Object = {**EVERYONE, "common": {"image": {"tag": "0.1.0"}}}
    assert pods(render_chart(chart, values)) == before
    for role in ("drafter", "retrieval", "verifier", "orchestrator"):
        values[role] = {**values.get(role, {}), "image": {"tag": "0.2.0"}}
        after = pods(render_chart(chart, values))
        assert [name for name in ROLES if after[name] != before[name]] == [role]
        before = after
    assert before == pods(render_chart(chart, EVERYONE))


@pytest.mark.parametrize(
    ("given", "grace"),
    [
        ({"graceSeconds": 600}, 600),
        ({"settings": {"grace_s": 600}}, 600),
        ({"settings": {"grace_s": 0.5}}, 1),
    ],
)
def test_a_pod_gets_the_time_that_its_process_takes_to_end(given: Object, grace: int) -> None:
    given = {"preStopSeconds": 7, **given}
    pod = pods(render({"orchestrator": given}))["orchestrator"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7 + 2 * grace + 10
